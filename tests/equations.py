"""The paper's equations in NumPy float64, token by token: full forward passes of every method, from tokens to logits.

Nothing is imported from dualres; only the names of the parameters are shared. Shapes: T tokens, D width, J streams.
Blocks, branches and streams count from 0 here; the paper's b and i count from 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]

# Which stream is the key and which the value for output stream j ("Retrieval variants").
ROUTES: dict[str, Callable[[int], tuple[int, int]]] = {
    "dar": lambda j: (1 - j, j),
    "selfkv": lambda j: (j, j),
    "fixedkv": lambda j: (0, 1),
    "crossv": lambda j: (j, 1 - j),
}


@dataclass(frozen=True)
class Network:
    """What the weights do not say. The family is standard, mhc, attnres or dar; `active` counts experts per token."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    branches_per_block: int
    share_parameters: bool = True
    route: str = "dar"
    streams: int = 1
    sinkhorn_steps: int = 20
    active: int = 0
    rope_base: float = 10_000.0
    eps: float = 1e-6


@dataclass
class Look:
    """What one sequence's pass through mHC or DAR shows, by the number of the branch; and a cut, if there is one."""

    cut: tuple[int, int] | None = None  # after this branch's write only this stream is kept; none, if there is no such
    streams: dict[int, Array] = field(default_factory=dict)  # after the write (J,T,D)
    write_gates: dict[int, Array] = field(default_factory=dict)  # (J,T)
    candidates: dict[int, tuple[Array | None, list[Array]]] = field(default_factory=dict)  # queries (J,D), R × (J,T,D)

    def written(self, number: int, streams: Array) -> Array:
        """The streams with which the pass goes on."""
        if self.cut is not None and self.cut[0] == number:
            streams = np.array([stream if j == self.cut[1] else 0 * stream for j, stream in enumerate(streams)])
        self.streams[number] = streams
        return streams


def logits(weights: Weights, tokens: NDArray[np.int64], net: Network, looks: Sequence[Look] | None = None) -> Array:
    """Tokens (B,T) -> logits (B,T,V), each sequence by itself, with a look at each."""
    table = weights["vocabulary.table.weight"]
    pathway = {"standard": standard, "mhc": mhc, "attnres": attnres, "dar": dar}[net.family]
    found = []
    for sequence, look in zip(tokens, looks or [Look() for _ in tokens], strict=True):
        h = pathway(weights, table[sequence], net, look)
        found.append([table @ (rms_norm(h[t], net.eps) * weights["norm.weight"]) for t in range(len(sequence))])
    return np.array(found)


# --- the branches f_ℓ: pre-norm attention or feed-forward ---


def branch(weights: Weights, block: int, i: int, x: Array, net: Network) -> Array:
    """u = f_ℓ(x) (T,D), normalization included; attention and feed-forward alternate over the whole network."""
    name = f"stack.blocks.{block}.branches.{i}"
    normed = np.array([rms_norm(x[t], net.eps) * weights[f"{name}.norm.weight"] for t in range(len(x))])
    if (block * net.branches_per_block + i) % 2 == 0:
        return attention(weights, f"{name}.module", normed, net)
    feed = experts if net.active else swiglu
    return np.array([feed(weights, f"{name}.module", normed[t], net) for t in range(len(x))])


def attention(weights: Weights, name: str, x: Array, net: Network) -> Array:
    """Causal grouped-query attention with rotary positions. (T,D) -> (T,D)"""
    width = x.shape[1] // net.heads
    query, key, value, output = (weights[f"{name}.{part}.weight"] for part in ("query", "key", "value", "output"))
    mixed = np.zeros((len(x), net.heads * width))
    for head in range(net.heads):
        mine = slice(head * width, (head + 1) * width)
        group = head // (net.heads // net.kv_heads)
        shared = slice(group * width, (group + 1) * width)
        for t in range(len(x)):
            q = rotate(query[mine] @ x[t], t, net.rope_base)
            keys = [rotate(key[shared] @ x[s], s, net.rope_base) for s in range(t + 1)]
            weight = softmax([q @ k / np.sqrt(width) for k in keys])
            for s in range(t + 1):
                mixed[t, mine] += weight[s] * (value[shared] @ x[s])
    return np.array([output @ mixed[t] for t in range(len(x))])


def rotate(x: Array, position: int, base: float) -> Array:
    """Rotary positions: number m of the first half and of the second turn as one pair by position·base^(−2m/h)."""
    half = len(x) // 2
    turned = np.zeros_like(x)
    for m in range(half):
        angle = position * base ** (-2 * m / len(x))
        turned[m] = x[m] * np.cos(angle) - x[half + m] * np.sin(angle)
        turned[half + m] = x[half + m] * np.cos(angle) + x[m] * np.sin(angle)
    return turned


def swiglu(weights: Weights, name: str, x: Array, net: Network) -> Array:
    """The dense feed-forward of one token (D,)."""
    gate, up, down = (weights[f"{name}.{part}.weight"] for part in ("gate", "up", "down"))
    return down @ (silu(gate @ x) * (up @ x))


def experts(weights: Weights, name: str, x: Array, net: Network) -> Array:
    """The sparse feed-forward of one token (D,): the best experts, weighed by a softmax over their scores alone."""
    scores = weights[f"{name}.router.weight"] @ x
    chosen = np.argsort(-scores)[: net.active]
    found = np.zeros_like(x)
    for weight, expert in zip(softmax(scores[chosen]), chosen, strict=True):
        gate, up = np.split(weights[f"{name}.gate_up"][expert], 2)
        found += weight * (weights[f"{name}.down"][expert] @ (silu(gate @ x) * (up @ x)))
    return found


# --- the residual pathways: embedding (T,D) -> what the final norm reads (T,D) ---


def standard(weights: Weights, embedding: Array, net: Network, look: Look) -> Array:
    """h_{ℓ+1} = h_ℓ + f_ℓ(h_ℓ)."""
    h = embedding
    for block, size in blocks(net):
        for i in range(size):
            h = h + branch(weights, block, i, h, net)
    return h


def mhc(weights: Weights, embedding: Array, net: Network, look: Look) -> Array:
    """mHC: read Σ_j pre_j X_j; X ← Sinkhorn(exp) X + post u; the output is the sum of the n streams."""
    x = np.array([embedding] * net.streams)  # (J,T,D)
    for block, size in blocks(net):
        for i in range(size):
            pathway = f"stack.blocks.{block}.pathway"
            read, written = np.zeros_like(embedding), np.zeros_like(x)
            for t in range(len(embedding)):
                pre = sigmoid(gate_logits(weights, f"{pathway}.pre.{i}", x[:, t], net))
                read[t] = sum(pre[j] * x[j, t] for j in range(net.streams))
            u = branch(weights, block, i, read, net)
            number = block * net.branches_per_block + i
            look.write_gates[number] = np.zeros((net.streams, len(embedding)))
            for t in range(len(embedding)):
                post = 2 * sigmoid(gate_logits(weights, f"{pathway}.post.{i}", x[:, t], net))
                mixing = gate_logits(weights, f"{pathway}.mixing.{i}", x[:, t], net)
                mixing = sinkhorn(mixing.reshape(net.streams, net.streams), net.sinkhorn_steps)
                look.write_gates[number][:, t] = post
                for j in range(net.streams):
                    written[j, t] = sum(mixing[j, k] * x[k, t] for k in range(net.streams)) + post[j] * u[t]
            x = look.written(number, written)
    return x.sum(axis=0)


def attnres(weights: Weights, embedding: Array, net: Network, look: Look) -> Array:
    """Attention Residuals, over blocks or branches, with or without value maps; a state is (key, value), each (T,D)."""
    history = [(embedding, embedding)]
    for block, size in blocks(net):
        partial: tuple[Array, Array] | None = None
        for i in range(size):
            candidates = history if partial is None else [*history, partial]
            query = depth_query(weights, block, i, size, net)
            read = np.zeros_like(embedding)
            for t in range(len(embedding)):
                q = None if query is None else query[0]
                read[t] = retrieve(q, [k[t] for k, _ in candidates], [v[t] for _, v in candidates], net.eps)
            u = branch(weights, block, i, read, net)
            value = mapped(weights, f"stack.blocks.{block}.pathway.maps.{i}", u)
            partial = (u, value) if partial is None else (partial[0] + u, partial[1] + value)
        assert partial is not None
        history.append(partial)
    query = weights["stack.readout.queries.weight"][0, 0]
    tokens = range(len(embedding))
    return np.array([retrieve(query, [k[t] for k, _ in history], [v[t] for _, v in history], net.eps) for t in tokens])


def mapped(weights: Weights, name: str, u: Array) -> Array:
    """ṽ = W v for every token (T,D), the low rank W being I + up·down; v itself where there is no map."""
    if f"{name}.weight" in weights:
        return np.array([weights[f"{name}.weight"] @ v for v in u])
    if f"{name}.down" in weights:
        return np.array([v + weights[f"{name}.up"] @ (weights[f"{name}.down"] @ v) for v in u])
    return u


def dar(weights: Weights, embedding: Array, net: Network, look: Look) -> Array:
    """Dual Attention Residuals and its retrieval variants: "Methods" from H_0 = [h, h] to h_out^0 + h_out^1."""
    history = [np.array([embedding, embedding])]  # each (2,T,D)
    for block, size in blocks(net):
        partial: Array | None = None
        for i in range(size):
            candidates = history if partial is None else [*history, partial]
            query = depth_query(weights, block, i, size, net)
            gates = f"stack.blocks.{block}.pathway.gates.{set_of(i, net)}"
            read, beta = np.zeros_like(embedding), np.zeros((len(embedding), 2))
            for t in range(len(embedding)):
                h = retrieve_dual(query, [c[:, t] for c in candidates], net)
                alpha = sigmoid(gate_logits(weights, f"{gates}.alpha", h, net))
                beta[t] = 2 * sigmoid(gate_logits(weights, f"{gates}.beta", h, net))
                read[t] = alpha[0] * h[0] + alpha[1] * h[1]
            u = branch(weights, block, i, read, net)
            updated = np.zeros_like(history[0])
            for t in range(len(embedding)):
                updated[:, t] = [beta[t, 0] * u[t], beta[t, 1] * u[t]]
                if partial is not None:
                    rho = sigmoid(gate_logits(weights, f"{gates}.rho", partial[:, t], net))[0]
                    updated[:, t] += np.array([[rho, 1 - rho], [1 - rho, rho]]) @ partial[:, t]
            number = block * net.branches_per_block + i
            look.write_gates[number], look.candidates[number] = beta.T, (query, list(candidates))
            partial = look.written(number, updated)
        assert partial is not None
        history.append(partial)
    query = weights["stack.readout.queries.weight"][0]
    look.candidates[-1] = query, history
    return np.array([retrieve_dual(query, [h[:, t] for h in history], net).sum(0) for t in range(len(embedding))])


# --- retrieval over depth and gates, for one token ---


def retrieve_dual(query: Array | None, candidates: Sequence[Array], net: Network) -> Array:
    """h^j for both output streams from candidates C_r (2,D), with the key and the value that the route names. (2,D)"""
    found = np.zeros_like(candidates[0])
    for j in range(2):
        key, value = ROUTES[net.route](j)
        q = None if query is None else query[j]
        found[j] = retrieve(q, [c[key] for c in candidates], [c[value] for c in candidates], net.eps)
    return found


def retrieve(query: Array | None, keys: Sequence[Array], values: Sequence[Array], eps: float) -> Array:
    """h = Σ_r π_r v_r with π_r ∝ φ(q, k_r) = exp(qᵀ Norm(k_r)); a lone candidate needs no query. (D,)"""
    if query is None:
        (alone,) = values
        return alone
    weight = softmax([query @ rms_norm(key, eps) for key in keys])
    found = np.zeros_like(values[0])
    for r, value in enumerate(values):
        found += weight[r] * value
    return found


def depth_query(weights: Weights, block: int, i: int, size: int, net: Network) -> Array | None:
    """The queries of a branch, one per output stream (J,D); None for a set that never sees two candidates."""
    sets = {set_of(position, net) for position in range(size)}
    if block == 0:  # its first branch sees the embedding alone
        sets = {set_of(position, net) for position in range(1, size)}
    name = f"stack.blocks.{block}.pathway.queries.weight"
    if name in weights:
        assert len(weights[name]) == len(sets), f"{name} holds {len(weights[name])} sets for {sets}"
    return weights[name][sorted(sets).index(set_of(i, net))] if set_of(i, net) in sets else None


def set_of(i: int, net: Network) -> int:
    """The parameter set of the branch at position i of its block."""
    return i % 2 if net.share_parameters else i


def gate_logits(weights: Weights, name: str, streams: Array, net: Network) -> Array:
    """scale · x̄ W + b, x̄ the RMSNorm of the concatenated streams (J,D). One number per gate value."""
    normed = rms_norm(streams.reshape(-1), net.eps).reshape(streams.shape)
    found = []
    for weight, bias in zip(weights[f"{name}.weight"], weights[f"{name}.bias"], strict=True):
        found.append(weights[f"{name}.scale"][0] * sum(weight[j] @ normed[j] for j in range(len(streams))) + bias)
    return np.array(found)


def sinkhorn(scores: Array, steps: int) -> Array:
    """Exp, then columns and rows in turn made to sum to one."""
    found = np.exp(scores)
    for _ in range(steps):
        found = found / found.sum(axis=0, keepdims=True)
        found = found / found.sum(axis=1, keepdims=True)
    return found


def blocks(net: Network) -> Iterator[tuple[int, int]]:
    """(block, number of its branches); the last block may be shorter."""
    for block, start in enumerate(range(0, 2 * net.layers, net.branches_per_block)):
        yield block, min(net.branches_per_block, 2 * net.layers - start)


def rms_norm(x: Array, eps: float) -> Array:
    """RMSNorm without a weight."""
    return x / np.sqrt(np.mean(x**2) + eps)


def softmax(scores: ArrayLike) -> Array:
    """Weights that sum to one."""
    scores = np.asarray(scores, np.float64)
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def sigmoid(x: Array) -> Array:
    """σ(x)."""
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    """x σ(x)."""
    return x * sigmoid(x)
