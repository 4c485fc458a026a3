"""The fused operators with their gradients. `dispatch` picks the kernels that run them.

For the backward pass an operator saves its arguments (states, updates, parameters) and token-wise numbers, but no other
tensor of a stream's size; the backward kernels recompute the rest. On a CPU, reads do not save large retrieved states
either: the backward pass calls the prefix again. Parameters arrive in float32, streams in their
storage dtype. Kernels fill in results and gradients that are allocated here, where their shapes are known.

An operator is an `autograd.Function` in eager mode, which takes the least time around a kernel, and an operator
registered with PyTorch where code is traced: by `torch.compile`, for shapes only, or under a dispatch mode.

Besides its results an operator returns carriers (`arguments.Live`): tensors of one element, expanded to the shape of
live streams, retrieved states or history states. The next operator sends the gradient of these back through them, so
that it is summed by the kernels that read its rows anyway, and never by PyTorch.
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets  K updates

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter, call, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualres.ops import checks, dispatch
from dualres.ops.arguments import (
    CARRIERS,
    STREAMS,
    HyperReadArguments,
    PrefixArguments,
    ReadArguments,
    Result,
    SavedPrefix,
    WriteArguments,
    result,
)

TYPES = {  # argument types and their names in a schema
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[int]: "int[]",
    int: "int",
    float: "float",
}
RECOMPUTE_BYTES = 2**21  # of retrieved states that are recomputed; a backward pass then needs the graph of their prefix
MAX_PLANS = 4096  # signatures that an operator remembers
KIND = attrgetter("shape", "dtype", "device", "requires_grad")  # of a tensor
CONTIGUOUS = methodcaller("is_contiguous")
Gradients = Sequence[Tensor | None]  # of results and carriers; None if nothing depends on one


class Layout(NamedTuple):
    """Where the tensors of a bundle are in a flat list."""

    bundle: Any  # the class
    counts: list[int | None]  # by field: the length of a list of tensors, −1 for a single tensor, None for neither
    others: list[Any]  # by field: what is not a tensor


class Operator(ABC):
    """A fused operator and its backward operator.

    A kernel takes the arguments and the empty results. A backward kernel takes gradients of results and carriers, the
    saved values, and the empty gradients, bundled like the arguments. The registered backward operator takes the same
    without the last and returns the gradients in order.
    """

    name: str
    takes: Any  # the class of its arguments
    saves: Any  # the class of its saved values
    gradients: str  # of results and carriers, as the backward operator takes them

    def __init__(self) -> None:
        name, schema = f"{dispatch.NAMESPACE}::{self.name}", f"({_schema(self.takes)}) -> Tensor[]"
        backward_schema = f"({self.gradients}, {_schema(self.saves)}) -> Tensor[]"
        self.recorded: Any = torch.library.custom_op(name, self.run, mutates_args=(), schema=schema)
        self.backward: Any = torch.library.custom_op(
            f"{name}_backward", self.run_backward, mutates_args=(), schema=backward_schema
        )
        self.recorded.register_fake(lambda *values: self.empty_outputs(self.takes(*values)))
        self.plans: dict[tuple[Any, ...], Plan] = {}  # by the signature of arguments that have passed all checks
        self.backward.register_fake(lambda *values: _flattened(self.checked_gradients(*self._split(values)))[0])
        self.recorded.register_autograd(_recorded_gradient, setup_context=self._save)

    def __call__(self, arguments: Any) -> Sequence[Tensor]:
        """The results, then the carriers if a gradient may follow. Takes any layout and parameter dtype."""
        tensors, form = _flattened(arguments)
        if dispatch.traced(tensors):
            return self.recorded(*_for_kernel(arguments))
        plan = self.plans.get(_signature(tensors, form))
        if plan is None:
            arguments = _for_kernel(arguments)
            tensors, form = _flattened(arguments)
            plan = self.plan(arguments, _signature(tensors, form))
        if plan.differentiable and torch.is_grad_enabled():
            return Fused.apply(plan, arguments, *tensors)
        return plan.run(arguments, tensors)

    def plan(self, arguments: Any, signature: tuple[Any, ...]) -> "Plan":
        """The plan for arguments as kernels take them, which are checked if their signature is new."""
        plan = self.plans.get(signature)
        if plan is None:
            self.check_all(arguments)
            plan = Plan(self, arguments)
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            self.plans[signature] = plan
        return plan

    @abstractmethod
    def check(self, arguments: Any) -> None:
        """Check shapes and devices."""

    @abstractmethod
    def results(self, arguments: Any) -> list[Result]:
        """What the operator returns for these arguments."""

    @abstractmethod
    def carriers(self, arguments: Any) -> list[Result]:
        """The carriers that it returns after its results."""

    def saved(self, arguments: Any, results: Sequence[Tensor]) -> Any:
        """What the backward kernel needs besides gradients."""
        return arguments._replace(carrier=None)

    def prefix_node(self, arguments: Any) -> tuple[Any, int] | None:
        """The autograd node that can recompute `retrieved`, and which of its outputs it is; None to save it."""
        return None

    def incoming(self, saved: Any, gradients: Gradients) -> Sequence[Any]:
        """The gradients as the backward kernel takes them: of results, with zeros for None, and of carriers."""
        d_h, d_next, *carried = gradients
        return *_given([d_h, d_next], lambda: self.results(saved)), *map(_contiguous, carried)

    @abstractmethod
    def outgoing(self, saved: Any, incoming: Sequence[Any]) -> Any:
        """What the backward kernel computes, bundled like the arguments: a `Result`, a list of them, or None."""

    def by_argument(self, layout: Layout, saved: Any, incoming: Sequence[Any], gradients: Any) -> Any:
        """The gradient of every argument, from those that the kernel has filled in."""
        return gradients._replace(updates=[None] * saved.carried + gradients.updates)

    def check_backward(self, saved: Any, incoming: Sequence[Any]) -> None:
        """Check what the backward operator takes: valid arguments, and gradients like the results and carriers."""
        self.check_all(saved)
        checks.like_results("d_", incoming, [*self.results(saved), *self.carriers(saved)])

    def check_all(self, arguments: Any) -> None:
        """Check shapes, devices, dtypes and layout."""
        self.check(arguments)
        checks.kernel_inputs(arguments)

    def run(self, *values: Any) -> list[Tensor]:
        """The registered operator."""
        arguments = self.takes(*values)
        outputs = self.empty_outputs(arguments)
        kernels = dispatch.kernels(_first(arguments))
        getattr(kernels, self.name)(arguments, outputs[: len(outputs) - len(self.carriers(arguments))])
        return outputs

    def run_backward(self, *values: Any) -> list[Tensor]:
        """The registered backward operator."""
        saved, incoming = self._split(values)
        gradients = self.checked_gradients(saved, incoming)
        getattr(dispatch.kernels(_first(incoming)), f"{self.name}_backward")(*incoming, saved, gradients)
        return _flattened(gradients)[0]

    def empty_outputs(self, arguments: Any) -> list[Tensor]:
        """Check the arguments; return everything that the operator returns, with nothing in it."""
        self.check_all(arguments)
        return [*map(Result.empty, self.results(arguments)), *map(Result.carrier, self.carriers(arguments))]

    def checked_gradients(self, saved: Any, incoming: Sequence[Any]) -> Any:
        """Check what the backward operator takes; return tensors for its kernel to fill in."""
        self.check_backward(saved, incoming)
        return _mapped(Result.empty, self.outgoing(saved, incoming))

    def _split(self, values: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """The saved values, and the gradients, which the backward operator takes first."""
        count = len(values) - len(self.saves._fields)
        return self.saves(*values[count:]), values[:count]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        arguments = self.takes(*inputs)
        saved = self.saved(arguments, output)
        ctx.save_for_backward(*_flattened(saved)[0])
        ctx.set_materialize_grads(False)
        layout = _layout(arguments)
        without: list[Any] = [[] if value == [] else None for value in layout.others]  # gradients of what is no tensor
        ctx.operator, ctx.layout, ctx.saved_layout = self, layout._replace(others=without), _layout(saved)


class Plan:
    """What follows from the signature of a call: its kernels, the tensors to allocate, and where gradients go."""

    def __init__(self, operator: Operator, arguments: Any):
        self.operator, self.kernels = operator, dispatch.kernels(_first(arguments))
        self.results = [result.allocator() for result in operator.results(arguments)]
        self.carriers = operator.carriers(arguments)
        self.differentiable = any(tensor.requires_grad for tensor in _flattened(arguments)[0])
        self.layout = _layout(arguments)
        self.saved_layout: Layout | None = None  # these two are known after the first call
        self.gradients: Any = None  # bundled allocators
        self.prepared: dict[Any, Any] = {}  # kernels, by the form of their arguments and the number of threads

    def run(self, arguments: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results for these arguments, whose tensors are passed a second time."""
        results = [empty() for empty in self.results]
        self.kernel(self.operator.name, [arguments, results], ())([*tensors, *results])
        return results

    def kernel(self, name: str, bundles: list[Any], form: Sequence[Any]) -> Callable[[Sequence[Tensor]], None]:
        """A kernel for bundles like these, which takes their tensors: packed once on a CPU, otherwise every time.

        `form` is what `_flattened` says about bundles that do not follow from the plan.
        """
        prepare = getattr(self.kernels, "Prepared", None)
        if prepare is None:
            return lambda tensors: getattr(self.kernels, name)(*bundles)
        key = name, torch.get_num_threads(), *form
        if key not in self.prepared:
            self.prepared[key] = prepare(getattr(self.kernels, name), bundles)
        return self.prepared[key]


class Fused(torch.autograd.Function):
    """An operator in eager mode. Its tensors are passed twice: bundled, and flat for autograd to see."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, arguments: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        operator, results = plan.operator, plan.run(arguments, tensors)
        saved = operator.saved(arguments, results)
        ctx.plan, ctx.unpacked, ctx.recomputed = plan, None, None
        ctx.prefix_node = operator.prefix_node(arguments)
        if ctx.prefix_node is not None:
            saved = saved._replace(retrieved=torch.empty(0, device="cpu"))
        plan.saved_layout = plan.saved_layout or _layout(saved)
        ctx.save_for_backward(*_flattened(saved)[0])
        ctx.set_materialize_grads(False)
        return *results, *[result.carrier() for result in plan.carriers]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        operator, saved = plan.operator, _saved(ctx)
        if ctx.prefix_node is not None:
            saved = saved._replace(retrieved=_recomputed(*ctx.prefix_node))
        incoming = operator.incoming(saved, gradients)
        if plan.gradients is None:
            plan.gradients = _mapped(Result.allocator, operator.outgoing(saved, incoming))
        filled = _mapped(call, plan.gradients)
        tensors, form = _flattened((*incoming, *saved, *filled))
        plan.kernel(f"{operator.name}_backward", [*incoming, saved, filled], form)(tensors)
        found = operator.by_argument(plan.layout, saved, incoming, filled)
        return None, None, *_laid_out(found, plan.layout)


FUSED_NODE: Any = Fused._backward_cls  # the class of its nodes in a graph


def _saved(node: Any) -> Any:
    """What a node of `Fused` has saved."""
    return node.unpacked or _unpacked(node.saved_tensors, node.plan.saved_layout)


def _recomputed(node: Any, output: int) -> Tensor:
    """An output of a prefix, which its node recomputes once per backward pass.

    The node keeps what it has unpacked for its own turn: with activation checkpointing, PyTorch unpacks only once.
    """
    if node.recomputed is None:

        def forget() -> None:
            node.unpacked = node.recomputed = None

        torch.autograd.Variable._execution_engine.queue_callback(forget)  # at the end of the pass
        node.unpacked = _saved(node)
        history, queries, *_, key, value = node.unpacked
        arguments = PrefixArguments(history, queries, key, value, node.plan.layout.others[-1])
        node.recomputed = node.plan.run(arguments, [*history, queries])
    return node.recomputed[output]


def _recorded_gradient(ctx: Any, gradients: Gradients) -> tuple[Any, ...]:
    operator: Operator = ctx.operator
    saved = _unpacked(ctx.saved_tensors, ctx.saved_layout)
    incoming = operator.incoming(saved, gradients)
    flat = iter(operator.backward(*incoming, *saved))
    filled = _mapped(lambda _: next(flat), operator.outgoing(saved, incoming))
    found = operator.by_argument(ctx.layout, saved, incoming, filled)
    return tuple(_unpacked(_laid_out(found, ctx.layout), ctx.layout))


def _flattened(bundle: Any) -> tuple[list[Tensor], list[Any]]:
    """The tensors of a bundle, in order, and everything else about it."""
    tensors: list[Tensor] = []
    form: list[Any] = []
    for value in bundle:
        if isinstance(value, Tensor):
            tensors.append(value)
            form.append(Tensor)
        elif not isinstance(value, list):
            form.append(value)
        elif value and isinstance(value[0], Tensor):
            tensors += value
            form.append(len(value))
        else:
            form.append(tuple(value))
    return tensors, form


def _signature(tensors: list[Tensor], form: list[Any]) -> tuple[Any, ...]:
    """All that checks and kernels depend on: of each tensor its kind and contiguity, and every other value."""
    return dispatch.FORCED, *form, *map(KIND, tensors), *map(CONTIGUOUS, tensors)


def _layout(bundle: Any) -> Layout:
    counts: list[int | None] = []
    others = []
    for value in bundle:
        single, several = isinstance(value, Tensor), _lists_tensors(value)
        counts.append(-1 if single else len(value) if several else None)
        others.append(None if single or several else value)
    return Layout(type(bundle), counts, others)


def _unpacked(tensors: Sequence[Any], layout: Layout) -> Any:
    rest = iter(tensors)
    values = [
        other if count is None else next(rest) if count < 0 else [next(rest) for _ in range(count)]
        for count, other in zip(layout.counts, layout.others, strict=True)
    ]
    return layout.bundle(*values)


def _laid_out(gradients: Any, layout: Layout) -> list[Tensor | None]:
    """The gradients of the tensors of a bundle with this layout, flat, with None where there is none."""
    flat: list[Tensor | None] = []
    for gradient, count in zip(gradients, layout.counts, strict=True):
        if count is not None:
            flat += [gradient] if count < 0 else [None] * count if gradient is None else gradient
    return flat


def _schema(arguments: Any) -> str:
    return ", ".join(f"{TYPES[kind]} {name}" for name, kind in arguments.__annotations__.items())


def _lists_tensors(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], Tensor)


def _first(values: Sequence[Any]) -> Tensor:
    first = values[0]
    return first[0] if isinstance(first, list) else first


def _mapped(function: Callable[[Any], Any], outgoing: Any) -> Any:
    """`outgoing` with function(result) in place of each result."""
    values = [
        None if value is None else [function(one) for one in value] if type(value) is list else function(value)
        for value in outgoing
    ]
    return type(outgoing)(*values)


def _like(name: str, tensor: Tensor) -> Result:
    return result(name, tensor.shape, tensor)


def _likes(bundle: Any) -> Any:
    """For every tensor of a bundle a `Result` like it; None for what is no tensor."""
    pairs = zip(bundle._fields, bundle, strict=True)
    return type(bundle)(
        *(
            _like(name, value)
            if isinstance(value, Tensor)
            else [_like(name, tensor) for tensor in value]
            if _lists_tensors(value)
            else []
            if value == []
            else None
            for name, value in pairs
        )
    )


def _for_kernel(arguments: Any) -> Any:
    """Make streams contiguous, and everything else float32 and contiguous; carriers stay as they are."""
    values = []
    for name, value in zip(arguments._fields, arguments, strict=True):
        if name not in CARRIERS:
            if isinstance(value, Tensor):
                value = _ready(name, value)
            elif _lists_tensors(value):
                value = [_ready(name, tensor) for tensor in value]
        values.append(value)
    return type(arguments)(*values)


def _ready(name: str, tensor: Tensor) -> Tensor:
    if name not in STREAMS and tensor.dtype is not torch.float32:
        tensor = tensor.to(torch.float32)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or gradient.is_contiguous() else gradient.contiguous()


def _given(gradients: Sequence[Tensor | None], results: Callable[[], Sequence[Result]]) -> list[Tensor]:
    """The gradients of results, zeros if nothing depends on one."""
    if any(gradient is None for gradient in gradients):
        pairs = zip(gradients, results(), strict=False)
        gradients = [result.zeros() if gradient is None else gradient for gradient, result in pairs]
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _live(coefficients: Tensor, like: Tensor) -> Result:
    """A carrier of the live streams, or its gradient; `like` has the width D."""
    _, streams, *tokens = coefficients.shape
    return result("live", (streams, *tokens, like.shape[-1]), like)


class PrefixOperator(Operator):
    """`reference.prefix`, and what its backward pass needs.

    -> retrieved U × (O,B,T,D), log-partition U × (O,B,T), logits (R,U,O,B,T), inverse norms (R,J,B,T);
    carriers of the history R × (J,B,T,D)
    """

    name, takes, saves = "prefix", PrefixArguments, SavedPrefix
    gradients = "Tensor[] d_retrieved, Tensor[] d_log_partition, Tensor[] d_carried"

    def check(self, arguments: PrefixArguments | SavedPrefix) -> None:
        checks.prefix(arguments.history, arguments.queries, arguments.key, arguments.value)

    def results(self, arguments: PrefixArguments | SavedPrefix) -> list[Result]:
        history, queries = arguments.history, arguments.queries
        state, (sets, outputs, width) = history[0], queries.shape
        streams, *tokens, _ = state.shape
        return [
            *[result("retrieved", (outputs, *tokens, width), state)] * sets,
            *[result("log_partition", (outputs, *tokens), queries)] * sets,
            result("logits", (len(history), sets, outputs, *tokens), queries),
            result("norms", (len(history), streams, *tokens), queries),
        ]

    def carriers(self, arguments: PrefixArguments | SavedPrefix) -> list[Result]:
        return [_like("carried", state) for state in arguments.history]

    def saved(self, arguments: PrefixArguments, results: Sequence[Tensor]) -> SavedPrefix:
        history, queries, key, value, _ = arguments
        sets = len(queries)
        partition, (logits, norms) = list(results[sets : 2 * sets]), results[2 * sets : 2 * sets + 2]
        return SavedPrefix(history, queries, partition, logits, norms, key, value)

    def incoming(self, saved: SavedPrefix, gradients: Gradients) -> Sequence[Any]:
        sets = len(saved.queries)
        given, carried = _given(gradients[: 2 * sets], lambda: self.results(saved)), gradients[2 * sets + 2 :]
        used = any(gradient is not None for gradient in carried)
        return given[:sets], given[sets:], _given(carried, lambda: self.carriers(saved)) if used else []

    def outgoing(self, saved: SavedPrefix, incoming: Sequence[Any]) -> PrefixArguments:
        return _likes(PrefixArguments(saved.history, saved.queries, saved.key, saved.value, 0.0))

    def by_argument(self, layout: Layout, saved: SavedPrefix, incoming: Sequence[Any], gradients: Any) -> Any:
        return gradients

    def check_backward(self, saved: SavedPrefix, incoming: Sequence[Any]) -> None:
        self.check_all(saved)
        (d_retrieved, d_partition, d_carried), results, sets = incoming, self.results(saved), len(saved.queries)
        checks.like_results("d_", [*d_retrieved, *d_partition], results[: 2 * sets])
        checks.like_results("", [*saved.log_partition, saved.logits, saved.norms], results[sets:])
        if d_carried:
            checks.like_results("d_", d_carried, self.carriers(saved))


class ReadOperator(Operator):
    """`reference.gated_read`, or `reference.read` without gates, which returns no coefficients.

    -> (B,T,D), (K+1,2,B,T) or (0,); carriers of the retrieved states (O,B,T,D) and of the live streams, if there are
    any, after the read (J,B,T,D)
    """

    name, takes, saves = "read", ReadArguments, ReadArguments
    gradients = "Tensor d_h, Tensor d_next_coefficients, Tensor? d_live, Tensor? d_retrieved"

    def check(self, arguments: ReadArguments) -> None:
        checks.read(arguments)

    def results(self, arguments: ReadArguments) -> list[Result]:
        shape = (len(arguments.updates) + 1, *arguments.log_partition.shape) if arguments.gates else (0,)
        return [
            result("h", arguments.retrieved.shape[1:], arguments.retrieved),
            result("next_coefficients", shape, arguments.log_partition),
        ]

    def carriers(self, arguments: ReadArguments) -> list[Result]:
        live = [] if arguments.coefficients is None else [_live(arguments.coefficients, arguments.retrieved)]
        return [_like("retrieved", arguments.retrieved), *live]

    def saved(self, arguments: ReadArguments, results: Sequence[Tensor]) -> ReadArguments:
        return arguments._replace(carrier=None, retrieved_carrier=None)

    def prefix_node(self, arguments: ReadArguments) -> tuple[Any, int] | None:
        """On a CPU, where a prefix costs less time than large retrieved states are worth in memory."""
        retrieved = arguments.retrieved
        node: Any = retrieved.grad_fn
        if not retrieved.is_cpu or retrieved.nbytes < RECOMPUTE_BYTES or type(node) is not FUSED_NODE:
            return None
        unchanged = retrieved._version == 0
        return (node, retrieved.output_nr) if node.plan.operator is prefix and unchanged else None

    def incoming(self, saved: ReadArguments, gradients: Gradients) -> Sequence[Any]:
        d_h, d_next, d_retrieved, *d_live = super().incoming(saved, gradients)
        return d_h, d_next, d_live[0] if d_live else None, d_retrieved

    def outgoing(self, saved: ReadArguments, incoming: Sequence[Any]) -> ReadArguments:
        likes = _likes(saved)
        return likes._replace(
            log_partition=likes.log_partition if saved.updates else None,
            updates=likes.updates[saved.carried :],
            coefficients=likes.coefficients if saved.gates else None,
            carrier=self.carriers(saved)[1] if saved.carried else None,
        )

    def by_argument(self, layout: Layout, saved: ReadArguments, incoming: Sequence[Any], gradients: Any) -> Any:
        gradients = super().by_argument(layout, saved, incoming, gradients)
        if layout.counts[ReadArguments._fields.index("retrieved_carrier")] is None:
            return gradients
        return gradients._replace(retrieved=None, retrieved_carrier=gradients.retrieved)

    def check_backward(self, saved: ReadArguments, incoming: Sequence[Any]) -> None:
        d_h, d_next, d_live, d_retrieved = incoming
        live = [] if d_live is None and not saved.updates else [d_live]
        super().check_backward(saved, [d_h, d_next, d_retrieved, *live])


class HyperReadOperator(Operator):
    """`reference.hyper_read`. -> (B,T,D), (K+1,J,B,T); a carrier of the live streams after the read (J,B,T,D)"""

    name, takes, saves = "hyper_read", HyperReadArguments, HyperReadArguments
    gradients = "Tensor d_h, Tensor d_next_coefficients, Tensor? d_live"

    def check(self, arguments: HyperReadArguments) -> None:
        checks.hyper_read(arguments)

    def results(self, arguments: HyperReadArguments) -> list[Result]:
        update, coefficients = arguments.updates[0], arguments.coefficients
        shape = (len(arguments.updates) + 1, *coefficients.shape[1:])
        return [result("h", update.shape, update), result("next_coefficients", shape, coefficients)]

    def carriers(self, arguments: HyperReadArguments) -> list[Result]:
        return [_live(arguments.coefficients, arguments.updates[0])]

    def outgoing(self, saved: HyperReadArguments, incoming: Sequence[Any]) -> HyperReadArguments:
        likes, carrier = _likes(saved), self.carriers(saved)[0] if saved.carried else None
        return likes._replace(updates=likes.updates[saved.carried :], carrier=carrier)


class WriteOperator(Operator):
    """`reference.write`. -> (J,B,T,D)"""

    name, takes, saves = "write", WriteArguments, WriteArguments
    gradients = "Tensor d_live"

    def check(self, arguments: WriteArguments) -> None:
        checks.write(arguments)

    def results(self, arguments: WriteArguments) -> list[Result]:
        update = arguments.updates[0]
        return [result("live", (arguments.coefficients.shape[1], *update.shape), update)]

    def carriers(self, arguments: WriteArguments) -> list[Result]:
        return []

    def saved(self, arguments: WriteArguments, results: Sequence[Tensor]) -> WriteArguments:
        """The updates with a gradient of their own are saved for that of their coefficients."""
        fresh = arguments.updates[arguments.carried :] if arguments.coefficients.requires_grad else []
        return arguments._replace(updates=fresh, carrier=None)

    def incoming(self, saved: WriteArguments, gradients: Gradients) -> Sequence[Any]:
        assert gradients[0] is not None, "the only result has a gradient, or none is asked for"
        return (gradients[0].contiguous(),)

    def outgoing(self, saved: WriteArguments, incoming: Sequence[Any]) -> WriteArguments:
        fresh = len(saved.coefficients) - saved.carried
        learned = _like("coefficients", saved.coefficients) if saved.updates else None
        outgoing: Any = ([_like("updates", incoming[0][0])] * fresh, learned, None, None)
        return WriteArguments(*outgoing)

    def by_argument(self, layout: Layout, saved: WriteArguments, incoming: Sequence[Any], gradients: Any) -> Any:
        """The sum of the first terms, which the carrier stands for, has the gradient of the result itself."""
        return super().by_argument(layout, saved, incoming, gradients._replace(carrier=incoming[0]))

    def check_backward(self, saved: WriteArguments, incoming: Sequence[Any]) -> None:
        (d_live,) = incoming
        checks.streams("d_live", [d_live], 2)
        fresh = len(saved.coefficients) - saved.carried if saved.coefficients.ndim else 0
        if fresh < 0 or saved.carried < 0 or (saved.updates and len(saved.updates) != fresh):
            raise ValueError(
                f"{len(saved.updates)} updates and carried={saved.carried} do not fit coefficients of shape "
                f"{tuple(saved.coefficients.shape)}: there must be one for each that is not carried, or none"
            )
        rows = [d_live[0]] * saved.carried + (saved.updates or [d_live[0]] * fresh)
        whole = WriteArguments(rows, saved.coefficients, None, 0)
        self.check_all(whole)
        checks.like_results("d_", incoming, self.results(whole))


prefix, read, hyper_read, write = PrefixOperator(), ReadOperator(), HyperReadOperator(), WriteOperator()
