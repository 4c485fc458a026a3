"""The decoder: embedding, branches on a residual pathway, final norm, vocabulary."""
# B batch  T tokens  D width  V vocabulary  P past and present tokens

import functools
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dualres.config.schema import ModelConfig, ResidualConfig
from dualres.model.attention import (
    Attention,
    Cache,
    Context,
    RouterReport,
    causal_mask,
    rotary_frequencies,
    rotary_tables,
    token_positions,
)
from dualres.model.block import NormedBranch, residual_stack
from dualres.model.feedforward import FeedForward
from dualres.model.moe import MoE


class Vocabulary(nn.Module):
    """Token embeddings and output weights; a narrower table is widened by a linear map (factorized embedding).

    If tied, the output uses the input's table and map, transposed.
    """

    def __init__(self, size: int, width: int, table_width: int, tied: bool):
        super().__init__()
        factorized = table_width != width
        self.table = nn.Embedding(size, table_width)
        self.widen = nn.Linear(table_width, width, bias=False) if factorized else None
        self.output = None if tied else nn.Linear(table_width, size, bias=False)
        self.narrow = nn.Linear(width, table_width, bias=False) if factorized and not tied else None

    def embed(self, tokens: Tensor) -> Tensor:
        """(B,T) -> (B,T,D)"""
        rows = self.table(tokens)
        return rows if self.widen is None else self.widen(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B,T,D) -> (B,T,V)"""
        return linear(*self.output_product(hidden))

    def output_product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The two factors of the logits: hidden states at the table's width E, and output weights.

        (B,T,D) -> (B,T,E), (V,E)
        """
        if self.narrow is not None:
            hidden = self.narrow(hidden)
        elif self.widen is not None:
            hidden = linear(hidden, self.widen.weight.T)
        return hidden, (self.table if self.output is None else self.output).weight


class Decoder(nn.Module):
    """A decoder-only Transformer on any residual pathway, initialized from `seed`."""

    def __init__(self, model: ModelConfig, residual: ResidualConfig, seed: int = 42):
        super().__init__()
        self.config, self.residual_config, self.head_width = model, residual, model.head_width
        self.vocabulary = Vocabulary(
            model.vocab_size, model.width, model.embedding_width or model.width, model.tied_embeddings
        )
        branches = [branch for layer in range(model.layers) for branch in layer_branches(model, layer)]
        self.stack = residual_stack(branches, model.width, residual, model.norm_eps)
        self.norm = nn.RMSNorm(model.width, model.eps_of_read(len(branches)))
        if not self.norm.weight.is_meta:
            self.reset_parameters(seed)

    def forward(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        report: RouterReport | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Next-token logits at every position, or at the last one. tokens (B,T) -> (B,T,V) or (B,1,V)

        See `hidden` for the other options.
        """
        hidden = self.hidden(tokens, attention_mask=attention_mask, cache=cache, report=report)
        return self.vocabulary.logits(hidden[:, -1:] if last_only else hidden)

    def hidden(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        report: RouterReport | None = None,
    ) -> Tensor:
        """The normalized hidden states that produce the logits. tokens (B,T) -> (B,T,D)

        attention_mask (B,P): False at left padding, cached tokens included; positions count from the first unmasked
        token. documents (B,P): the document number of each token; tokens attend only within their document (positions
        continue: rotary attention depends on distances alone). cache: keys and values of earlier tokens, updated in
        place. report: collects the router's auxiliary losses.
        """
        past = cache.get_seq_length() if cache is not None else 0
        batch, length = tokens.shape
        for name, tensor in (("attention_mask", attention_mask), ("documents", documents)):
            if tensor is not None and tensor.shape != (batch, past + length):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; {batch} × {length} tokens after {past} cached ones need "
                    f"{(batch, past + length)}"
                )
        attention_mask = None if attention_mask is None else attention_mask.bool()
        positions = token_positions(length, past, attention_mask, tokens.device)
        mask = causal_mask(length, past, attention_mask, documents, tokens.device)
        embedding = self.vocabulary.embed(tokens)
        return self.norm(self.stack(embedding, context=self.context(embedding, positions, mask, cache, report)))

    def context(
        self,
        embedding: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache | None = None,
        report: RouterReport | None = None,
    ) -> Context:
        """The context of the branches, also for callers with their own embeddings, positions and mask.

        embedding (B,T,D), positions (B or 1,T), mask (B or 1,1,T,P): True where a token may attend; None if it is
        causal with nothing cached, or for a single token
        """
        precise, config = torch.promote_types(embedding.dtype, torch.float32), self.config
        frequencies = rotary_frequencies(
            self.head_width, config.rope_base, config.rope_scaling, precise, embedding.device
        )
        return Context(*rotary_tables(positions, frequencies), mask, cache, report)

    def reset_parameters(self, seed: int = 42) -> None:
        """Initialize all weights. The same seed gives the same vocabulary and branches for every residual method."""
        for part, name in self.parts():
            reset_part(part, name, self.config.init_std, seed)

    def parts(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules that are initialized independently, with names that do not depend on the block size."""
        yield self.vocabulary, "vocabulary"
        layer = 0
        for b, block in enumerate(self.stack):
            for branch in block.branches:
                yield branch, f"branch {layer}"
                layer += 1
            yield block.pathway, f"pathway {b}"
        yield self.stack.readout, "readout"
        yield self.norm, "norm"


def layer_branches(model: ModelConfig, layer: int) -> tuple[NormedBranch, NormedBranch]:
    attention = Attention(model, layer)
    feedforward: nn.Module
    if model.moe is not None:
        moe = model.moe
        feedforward = MoE(model.width, moe.expert_width, moe.experts, moe.active, moe.aux_coefficient, layer)
    else:
        assert model.ffn_width is not None  # checked by ModelConfig
        feedforward = FeedForward(model.width, model.ffn_width)
    norms = [nn.RMSNorm(model.width, model.eps_of_read(2 * layer + i)) for i in range(2)]
    return NormedBranch(norms[0], attention), NormedBranch(norms[1], feedforward)


def build_decoder(
    model: ModelConfig, residual: ResidualConfig, *, device: str | torch.device = "cpu", seed: int = 42
) -> Decoder:
    """A decoder with new weights on `device`; on "meta" it has shapes only and takes no memory."""
    with torch.device("meta"):
        decoder = Decoder(model, residual)
    if torch.device(device).type == "meta":
        return decoder
    decoder.to_empty(device=device)
    decoder.reset_parameters(seed)
    return decoder


@functools.cache
def meta_decoder(model: ModelConfig, residual: ResidualConfig) -> Decoder:
    """A decoder on the meta device, to count on. It is shared: do not change it."""
    return build_decoder(model, residual, device="meta")


def reset_part(part: nn.Module, name: str, std: float, seed: int) -> None:
    """Initialize one part from its own generator, so that parts can be initialized separately and in any order."""
    generator = part_generator(part, name, seed)
    for module in part.modules():
        reset_module(module, std, generator)


def part_generator(part: nn.Module, name: str, seed: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator(next(part.parameters(), torch.empty(0)).device)
    return generator.manual_seed(int.from_bytes(digest, "little") >> 1)


def reset_module(module: nn.Module, std: float, generator: torch.Generator | None) -> None:
    """Matrices N(0, std), biases zero, norm weights one; other modules reset themselves."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, MoE):
        module.reset_parameters(generator, std)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset(generator)
