"""A residual block and a stack of blocks, for any branches and pathways."""
# B batch  T tokens  D width  J streams

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dualres import ops
from dualres.config.schema import ResidualConfig
from dualres.config.validation import choices, did_you_mean
from dualres.ops import Norm
from dualres.ops.grouped import OPERATORS
from dualres.residual import registry
from dualres.residual.pathway import History, Pathway

Recompute = Literal["none", "selective", "full"]  # what a block saves for its backward pass: `CHECKPOINT_OPTIONS`
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # attributes of PyTorch's wrappers that forward any keyword
COMPILATIONS_PER_BLOCK = 8  # training, validation, another shape, …: PyTorch's default limit for one function


class NormedBranch(nn.Module):
    """f_l: a module with its input norm, which the pathway fuses into its read. It never sees a stream.

    In a block only `module` is called, so hooks on the branch or on its norm do not fire there.
    """

    def __init__(self, norm: nn.RMSNorm, module: nn.Module):
        super().__init__()
        plain = isinstance(norm, nn.RMSNorm) and type(norm).forward is nn.RMSNorm.forward
        if not plain or norm.eps is None or not norm.elementwise_affine or len(norm.normalized_shape) != 1:
            raise ValueError(
                f"the norm of a NormedBranch must be an RMSNorm with weights and an eps, nn.RMSNorm(width, eps=1e-6), "
                f"got {norm}: put any other norm into the branch itself, as its first step"
            )
        self.norm = norm
        self.module = module

    def forward(self, h: Tensor, **context: Any) -> Tensor:
        """The branch by itself. (B,T,D) -> (B,T,D)"""
        return self.module(self.norm(h), **context)


class ResidualBlock(nn.Module):
    """One block: the unit of sharding, recomputation, compilation and pipeline stages.

    A branch gets those of the keyword arguments that its `forward` takes, as it is when the block is built.
    """

    def __init__(self, branches: Sequence[nn.Module], pathway: Pathway):
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.keywords = [branch_keywords(branch) for branch in branches]  # of each branch; None: it takes any
        self.pathway = pathway
        self.recompute: Recompute = "none"
        self.compiled_run: Callable[..., tuple[Tensor, ...]] | None = None  # `run`, if `compile_blocks` has compiled it
        self.compiled_branches: Callable[..., Tensor] | None = None  # `run_opened`, likewise
        self.tap: Any = None  # a wrapper of the pathway, set by an analysis (`dualres.analyze.taps`)

    def forward(self, *history: Tensor, **context: Any) -> tuple[Tensor, ...]:
        """H_0 … H_{b-1} (only the last for a pathway without history), each (J,B,T,D) -> H_b (J,B,T,D), carriers

        Through the carriers of the history, if any, later blocks send its gradient: `after`.
        """
        if self.compiled_run is None:
            return self.run(*history, **context) if self.recomputes() else self.compute(*history, **context)
        if self.recomputes() or not self.pathway.keeps_history:
            return self.compiled_run(*history, **context)
        pathway: Pathway = self.tap or self.pathway
        state = pathway.open(history)  # outside of the graph, so that histories of all lengths share one
        assert self.compiled_branches is not None
        return self.compiled_branches(pathway.without_carriers(state), **context), *pathway.carriers(state)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are neither compiled nor tapped, as with `nn.Module.compile`."""
        return {**super().__getstate__(), "compiled_run": None, "compiled_branches": None, "tap": None}

    def recomputes(self) -> bool:
        """Whether the block will be recomputed in the backward pass."""
        return self.recompute != "none" and torch.is_grad_enabled()

    def run(self, *history: Tensor, **context: Any) -> tuple[Tensor, ...]:
        """The part that is compiled: `forward` wraps it, so that an engine's hooks on the module stay outside."""
        if not self.recomputes():
            return self.compute(*history, **context)
        keep = CHECKPOINT_OPTIONS[self.recompute]
        return checkpoint(self.compute, *history, use_reentrant=False, **keep, **context)

    def compute(self, *history: Tensor, **context: Any) -> tuple[Tensor, ...]:
        """The block itself, which is the part that is recomputed: H_b, and carriers of the history, if any."""
        pathway: Pathway = self.tap or self.replay(history) or self.pathway
        state = pathway.open(history)
        return self.run_branches(pathway, state, context), *pathway.carriers(state)

    def replay(self, history: History) -> Any:
        """A pass with recorded calls in place of the pathway, if there is one: for few tokens without gradients."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        norms = [norm for norm in map(input_norm, self.branches) if norm is not None]
        return self.pathway.replay(history, norms) if len(norms) == len(self.branches) else None

    def run_opened(self, state: Any, **context: Any) -> Tensor:
        """The block from an opened state on, which is compiled if the history is not."""
        return self.run_branches(self.tap or self.pathway, state, context)

    def run_branches(self, pathway: Pathway, state: Any, context: dict[str, Any]) -> Tensor:
        """All branches, from an opened state to H_b."""
        for i, (branch, names) in enumerate(zip(self.branches, self.keywords, strict=True)):
            h, state = pathway.read(state, i, input_norm(branch))
            own = context if names is None else {name: context[name] for name in names if name in context}
            update = (branch.module if isinstance(branch, NormedBranch) else branch)(h, **own)
            state = pathway.write(state, i, checked_update(update, h))
        return pathway.close(state)


def branch_keywords(branch: nn.Module) -> tuple[str, ...] | None:
    """The keyword arguments that a branch takes besides its input; None if it takes any, by `**kwargs`."""
    for name in WRAPPED:
        branch = getattr(branch, name, branch)
    if isinstance(branch, NormedBranch):
        return branch_keywords(branch.module)
    try:
        parameters = list(inspect.signature(branch.forward).parameters.values())
    except (TypeError, ValueError):  # a forward that is not written in Python
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters[1:] if parameter.kind in named)


def input_norm(branch: nn.Module) -> Norm | None:
    """The norm that the pathway applies for the branch; None if the branch applies its own."""
    if not isinstance(branch, NormedBranch):
        return None
    norm: Any = branch._modules["norm"]  # past `nn.Module.__getattr__`, which a small model would notice
    if "weight" in norm._parameters:
        return Norm(norm._parameters["weight"], norm.eps)  # by index, not `get`: ZeRO-3 then gathers it
    return Norm(norm.weight, norm.eps)


def checked_update(update: Tensor, h: Tensor) -> Tensor:
    """The output of a branch for `h`, made contiguous so that no later read has to copy it.

    Raises for a different shape, which would silently be broadcast into the streams.
    """
    if not isinstance(update, Tensor) or update.shape != h.shape:
        result = tuple(update.shape) if isinstance(update, Tensor) else type(update).__name__
        raise ValueError(f"a branch returned {result} for an input of {tuple(h.shape)}: it must return the same shape")
    return update.contiguous()


class ResidualStack(nn.Module):
    """A network without embedding and output: blocks over a growing history, then the readout."""

    def __init__(self, blocks: Sequence[ResidualBlock], readout: nn.Module, streams: int, width: int):
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(blocks)
        self.readout = readout
        self.streams = streams
        taken = [names for block in blocks for names in block.keywords]
        # What its branches take; None: anything.
        self.keywords = None if None in taken else tuple(dict.fromkeys(name for names in taken for name in names or ()))

    def __iter__(self) -> Iterator[ResidualBlock]:
        """The blocks, from the embedding up."""
        return iter(cast(Sequence[ResidualBlock], self.blocks))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def keeps_history(self) -> bool:
        """Whether a block sees all states before it, or only the last."""
        return next(iter(self)).pathway.keeps_history

    def start_divisors(self) -> list[float]:
        """The divisors of the standard residual's state in every branch's input and the output, at the zero start.

        -> one per branch, then the output's. With eps / divisor² the norms match those of the standard residual.
        """
        inside = [block.pathway.start_divisor(i) for block in self for i in range(len(block.branches))]
        readout = cast(Any, self.readout)
        return [*inside, readout.start_divisor(self.streams, 1 + len(self.blocks))]

    def forward(self, embedding: Tensor, **context: Any) -> Tensor:
        """(B,T,D), or any other axes before the width -> the same.

        Each branch gets those of the keyword arguments that its `forward` takes. One that no branch takes is an error.
        """
        for name in context:
            if self.keywords is not None and name not in self.keywords:
                valid = f"they take {', '.join(self.keywords)}" if self.keywords else "they take none"
                remedy = did_you_mean(name, self.keywords) or "remove it, or add it to the forward of a branch"
                raise TypeError(f"no branch takes the keyword argument {name!r} ({valid}): {remedy}")
        if embedding.ndim and embedding.shape[-1] != self.width:
            raise ValueError(
                f"the input has width {embedding.shape[-1]}, but the stack was built with width {self.width}"
            )
        history = embed(embedding, self.streams)
        for block in self:
            history = after(block, history, **context)
        return self.readout(*history)


def embed(embedding: Tensor, streams: int) -> History:
    """H_0: the embedding in each of J streams. (B,T,D), or any other token axes -> one state (J,B,T,D)"""
    if embedding.ndim == 0:
        raise ValueError("the embedding is a single number: it must be (…, width)")
    return (embedding.expand(streams, *embedding.shape).contiguous(),)


def after(block: ResidualBlock, history: History, **context: Any) -> History:
    """The history that the next block sees: the block's history with its output."""
    state, *carriers = block(*history, **context)
    return extended(ops.passed_on(history, carriers), state, block.pathway)


def extended(history: History, state: Tensor, pathway: Pathway) -> History:
    """H_0 … H_b, or only H_b if the pathway keeps no history."""
    return (*history, state) if pathway.keeps_history else (state,)


def residual_stack(
    branches: Iterable[nn.Module], width: int, residual: ResidualConfig | str, eps: float = 1e-6
) -> ResidualStack:
    """Put branches, each a module (B,T,D) -> (B,T,D) with its own input norm, on a residual pathway.

    Keyword arguments of the stack go to the branches whose `forward` takes them.
    `residual` is a method's name, such as "dar-block", or a `ResidualConfig` with its options. With
    `share_parameters=True` every second branch of a block shares its queries and gates, since attention and
    feed-forward alternate; for branches in a different order use `share_parameters=False`.
    """
    branches = list(branches)
    config = ResidualConfig(residual) if isinstance(residual, str) else residual
    network = registry.build(width, len(branches), config, eps)
    rest = iter(branches)
    blocks = [
        ResidualBlock([next(rest) for _ in place.set_of_branch], pathway)
        for place, pathway in zip(network.places, network.pathways, strict=True)
    ]
    return ResidualStack(blocks, network.readout, network.streams, width)


PRODUCTS = [  # the operators that cost most to recompute for the memory they take
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    OPERATORS.grouped_linear.default,
]
DROPOUT = {  # the position of the argument dropout_p in operators that have one
    product: [argument.name for argument in product._schema.arguments].index("dropout_p")
    for product in PRODUCTS
    if "dropout_p" in str(product._schema)
}


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the result of a product, unless it draws random numbers.

    Such an operator must run again: otherwise later draws in the block would get different random numbers.
    """
    place = DROPOUT.get(operator)
    drops = place is not None and (args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)) > 0
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS and not drops else CheckpointPolicy.PREFER_RECOMPUTE


# "full" saves only the block's inputs; "selective" also the results of matrix products and attention. Both save the
# random state, so that a branch's dropout repeats its mask.
CHECKPOINT_OPTIONS: dict[str, dict[str, Any]] = {  # options of `torch.utils.checkpoint.checkpoint`
    "full": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)},
}


def recompute_blocks(model: nn.Module, how: Recompute) -> None:
    """Save less of every block of the model for the backward pass and recompute it there."""
    if how not in get_args(Recompute):
        raise ValueError(f"recompute_blocks(…, {how!r}): use {choices(map(repr, get_args(Recompute)))}")
    for block in _blocks(model):
        block.recompute = how


def _blocks(model: nn.Module) -> list[ResidualBlock]:
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no residual blocks: pass a model with a residual_stack")
    return blocks


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """`torch.compile` every block separately, in place. Copies of the model are not compiled: call this for each copy.

    Blocks of the same shape share one graph, unless they are recomputed: then the graph includes the history, whose
    length differs from block to block.

    This changes two PyTorch settings for the whole process. The recompilation limit grows with the number of blocks.
    And backward passes run without autocast, as in eager mode, so that the gradients of depth scores and gates stay in
    float32.
    """
    dynamo, blocks = torch._dynamo.config, _blocks(model)
    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILATIONS_PER_BLOCK * len(blocks))
    dynamo.accumulated_recompile_limit = max(
        dynamo.accumulated_recompile_limit, 4 * COMPILATIONS_PER_BLOCK * len(blocks)
    )
    torch._functorch.config.backward_pass_autocast = "off"
    for block in blocks:
        block.compiled_run = torch.compile(block.run, **options)
        block.compiled_branches = torch.compile(block.run_opened, **options)
