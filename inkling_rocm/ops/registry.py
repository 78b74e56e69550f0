"""Which implementation of each op runs: a table look-up with reasons.

Every op file ends in a `VARIANTS` tuple, best first. A variant says why it cannot run (`supports`
returns the reason) or that it can (None). `resolve_ops` takes the first that can, or the one that
was asked for; asking for one that cannot run raises with its reason. Nothing falls back silently:
`OpSet.choices` keeps every refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from inkling_rocm.config import InklingConfig
from kernel_base.arch import Arch

OP_NAMES = (
    "embed",
    "linear",
    "attention_prologue",
    "rel_attention",
    "residual_conv_norm",
    "rms_norm",
    "dense_mlp",
    "gate",
    "experts",
    "lm_head",
)
# Which of SGLang's backend flags restricts an op; the others are always chosen automatically.
BACKEND_FLAG = {
    "rel_attention": "attention_backend",
    "experts": "moe_runner_backend",
}


@dataclass(frozen=True, kw_only=True)
class OpContext:
    """What a variant may look at when it says whether it can run.

    Attributes:
        ep_size: ranks over which the routed experts are spread whole: 1, or tp_size.
    """

    config: InklingConfig
    arch: Arch
    dtype: str
    tp_size: int
    ep_size: int = 1


# A layer's weights by name -> what the variant wants of them.
Prepare = Callable[[MutableMapping[str, Tensor]], Any]


def _attribute(path: str) -> Callable:
    module, attribute = path.split(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One implementation of one op.

    Attributes:
        name: "torch", "triton", "aiter", ...: what the backend flags name.
        function: "module:attribute", imported only when chosen: the op, by its contract.
        per_engine: `function` names a factory instead: called with the OpContext once for every
            OpSet, it returns the op. For variants that own scratch memory, and for those that must
            know the architecture (emulated ones run on CPU tensors).
        prepare: "module:attribute" of a function (weights, context) -> anything, or None. It runs
            once a layer when the model is built, and again when weights have changed (see
            `InklingModel.prepare`); the op then gets its result as the keyword `prepared`.
            `weights` are the layer's, by their names below "layers.{i}."; entries that only this
            op reads may be deleted to free them, and the op then gets None for them.
        supports: returns None when it can run in this context, else the reason it cannot.
    """

    name: str
    function: str
    supports: Callable[[OpContext], str | None] = lambda context: None
    per_engine: bool = False
    prepare: str | None = None

    def load(self, context: OpContext) -> Callable:
        """The op, ready to be called."""
        function = _attribute(self.function)
        return function(context) if self.per_engine else function

    def load_prepare(self, context: OpContext) -> Prepare | None:
        """`prepare` with its context bound; None if the variant has none."""
        if self.prepare is None:
            return None
        return partial(_attribute(self.prepare), context=context)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome for one op: the variant taken and why each better-ranked one was not."""

    op: str
    variant: str
    refused: Mapping[str, str]


class OpSet:
    """The chosen functions, one attribute an op, how they were chosen, and by op what prepares a
    layer's weights for them."""

    embed: Callable
    linear: Callable
    attention_prologue: Callable
    rel_attention: Callable
    residual_conv_norm: Callable
    rms_norm: Callable
    dense_mlp: Callable
    gate: Callable
    experts: Callable
    lm_head: Callable

    def __init__(
        self,
        functions: Mapping[str, Callable],
        choices: tuple[Choice, ...],
        prepares: Mapping[str, Prepare],
    ):
        for op in OP_NAMES:
            setattr(self, op, functions[op])
        self.choices = choices
        self.prepares = prepares


def variants_of(op: str) -> tuple[Variant, ...]:
    """All variants of an op, best first."""
    return import_module(f"inkling_rocm.ops.{op}").VARIANTS


def choose(op: str, context: OpContext, backend: str = "auto") -> tuple[Variant, Choice]:
    """The variant of `op` for this context.

    Raises: ValueError: the named backend does not exist for this op or cannot run here, with the
        reason; or no variant can run at all.
    """
    refused: dict[str, str] = {}
    variants = variants_of(op)
    flag = "--" + BACKEND_FLAG.get(op, op).replace("_", "-")
    if backend not in ("auto", *(variant.name for variant in variants)):
        names = ", ".join(("auto", *(variant.name for variant in variants)))
        raise ValueError(f"{flag} {backend}: {op} has no such variant; choose from {names}")
    for variant in variants:
        if backend not in ("auto", variant.name):
            refused[variant.name] = f"{flag} {backend} was asked for"
            continue
        reason = variant.supports(context)
        if reason is None:
            return variant, Choice(op=op, variant=variant.name, refused=refused)
        refused[variant.name] = reason
    where = f"{context.arch.name}, {context.dtype}, TP{context.tp_size}"
    if backend != "auto":
        raise ValueError(f"{flag} {backend} cannot run {op} on {where}: {refused[backend]}")
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise ValueError(f"no variant of {op} can run on {where}: {reasons}")


def resolve_ops(
    config: InklingConfig,
    arch: Arch,
    *,
    dtype: str = "bfloat16",
    attention_backend: str = "auto",
    moe_runner_backend: str = "auto",
    tp_size: int = 1,
    ep_size: int = 1,
) -> OpSet:
    """Choose a variant for every op.

    Args: dtype: the model's, as torch spells it ("bfloat16"); the backends: SGLang's flags, "auto"
        or a variant's name.
    Raises: ValueError: see `choose`.
    """
    context = OpContext(config=config, arch=arch, dtype=dtype, tp_size=tp_size, ep_size=ep_size)
    backends = {"attention_backend": attention_backend, "moe_runner_backend": moe_runner_backend}
    functions, choices, prepares = {}, [], {}
    for op in OP_NAMES:
        backend = backends.get(BACKEND_FLAG.get(op, ""), "auto")
        variant, choice = choose(op, context, backend)
        functions[op] = variant.load(context)
        if prepare := variant.load_prepare(context):
            prepares[op] = prepare
        choices.append(choice)
    return OpSet(functions, tuple(choices), prepares)
