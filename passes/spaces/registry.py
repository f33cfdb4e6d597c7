"""Registry of iteration-space rules: one entry per aten op, duplicates refused.

A rule is a pure function of a :class:`Call` (shapes and non-tensor arguments) that
returns a :class:`Spec`, usually through :func:`space`, which reads sizes off the
operands' shapes: ``space(call, GEMM, {"input": "bsk", "weight": "nk"}, ["bsn"], "k")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import cast

from passes.ir import Attr, Axis, DimKind, OpKind

Shape = tuple[int, ...]
Label = str | tuple[str, ...] | Axis | None
Labels = str | Sequence[Label]

WHOLE = Axis()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class RuleMismatch(Exception):
    """The rule does not cover this use of its op: the op becomes UNKNOWN."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument: its position among the op's tensors, shape and dtype."""

    index: int
    shape: Shape
    dtype: str = "float32"

    @property
    def rank(self) -> int:
        return len(self.shape)


def items(value: object) -> list[object] | None:
    """A list argument's items; None for anything else."""
    if isinstance(value, (list, tuple)):
        return list(cast(Sequence[object], value))
    return None


@dataclass(frozen=True, slots=True)
class Call:
    """One op as a rule sees it.

    ``args`` by schema name, defaults filled in; tensor arguments are :class:`Ref`.
    ``factors``: per tensor and axis, the sizes of the factors that its producer keeps
    (``(b, s)`` of a merged axis). ``slices``: where sibling slices tile the axis of a
    slice exactly, their sizes.
    """

    target: str
    args: Mapping[str, object]
    tensors: tuple[Ref, ...]
    outputs: tuple[Shape, ...]
    out_dtypes: tuple[str, ...] = ()
    factors: tuple[tuple[Shape, ...], ...] = ()
    slices: Shape = ()

    def ref(self, name: str) -> Ref:
        value = self.args.get(name)
        if not isinstance(value, Ref):
            raise RuleMismatch(f"argument {name} is not a tensor")
        return value

    def has(self, name: str) -> bool:
        return isinstance(self.args.get(name), Ref)

    def refs(self, name: str) -> list[Ref]:
        found = items(self.args.get(name))
        if found is None:
            raise RuleMismatch(f"argument {name} is not a list of tensors")
        return [v for v in found if isinstance(v, Ref)]

    def int(self, name: str, default: int = 0) -> int:
        value = self.args.get(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)):
            raise RuleMismatch(f"argument {name} is not a number")
        return int(value)

    def ints(self, name: str, count: int = 0) -> tuple[int, ...]:
        """A list argument; a single number is repeated ``count`` times."""
        value = self.args.get(name)
        if value is None:
            return ()
        if isinstance(value, (int, float)):
            return (int(value),) * max(1, count)
        numbers = [int(v) for v in items(value) or () if isinstance(v, (int, float))]
        if len(numbers) != len(items(value) or (None,)) and items(value) != []:
            raise RuleMismatch(f"argument {name} is not a list of numbers")
        return tuple(numbers * count if len(numbers) == 1 and count else numbers)

    def axis(self, name: str, rank: int, default: int = 0) -> int:
        return self.int(name, default) % max(1, rank)

    @property
    def out(self) -> Shape:
        if not self.outputs:
            raise RuleMismatch("no tensor output")
        return self.outputs[0]


@dataclass(slots=True)
class Spec:
    """What a rule returns. ``order`` permutes the op's tensors (operands first).

    ``attrs`` are the fixed attributes; those that follow from shapes are derived.
    """

    kind: OpKind
    dims: dict[str, tuple[int, DimKind]]
    inputs: list[tuple[Axis, ...]]
    outputs: list[tuple[Axis, ...]]
    order: tuple[int, ...]
    attrs: dict[str, Attr] = field(default_factory=dict[str, Attr])


Rule = Callable[[Call], Spec]
RULES: dict[str, Rule] = {}


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a rule for ops named ``namespace.op`` or ``namespace.op.overload``."""

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"duplicate iteration-space rule for {target}")
            RULES[target] = function
        return function

    return register


def lead(count: int) -> list[str]:
    """Names of ``count`` leading (batch-like) dims."""
    if count <= 3:
        return [[], ["m"], ["b", "s"], ["b", "s", "t"]][count]
    return list("bstuwxyz")[:count] if count <= 8 else [f"b{i}" for i in range(count)]


def positional(rank: int) -> list[str]:
    """Names of all dims of a tensor that is indexed elementwise."""
    names = ["", "d", "md", "bsd", "bhsd"]
    if rank < len(names):
        return list(names[rank])
    return list(LETTERS[:rank]) if rank <= 26 else [f"d{i}" for i in range(rank)]


class _Builder:
    def __init__(self, sizes: Mapping[str, int] | None) -> None:
        self.sizes: dict[str, int] = dict(sizes or {})
        self.used: list[str] = list(self.sizes)

    def note(self, label: str, size: int) -> None:
        known = self.sizes.setdefault(label, size)
        if known == 1 and size != 1:
            self.sizes[label] = size
        elif size not in (1, known):
            raise RuleMismatch(f"dim {label} is {known} and {size}")
        if label not in self.used:
            self.used.append(label)

    def collect(self, labels: Labels, shape: Shape) -> None:
        if len(labels) != len(shape):
            raise RuleMismatch(f"labels {labels} for shape {shape}")
        for label, size in zip(labels, shape, strict=True):
            if isinstance(label, tuple) and len(label) == 1:
                label = label[0]
            if isinstance(label, str):
                self.note(label, size)

    def axis(self, label: Label, size: int) -> Axis:
        if label is None or size == 1:
            return WHOLE
        if isinstance(label, Axis):
            return label
        names = (label,) if isinstance(label, str) else label
        names = tuple(n for n in names if self.sizes[n] != 1)
        if prod(self.sizes[n] for n in names) != size:
            raise RuleMismatch(f"axis {label} of size {size}")
        return Axis(names)


def space(
    call: Call,
    kind: OpKind,
    inputs: Mapping[str, Labels | Sequence[Labels]],
    outputs: Sequence[Labels],
    reduction: Sequence[str] = (),
    coupled: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    attrs: Mapping[str, Attr] | None = None,
    only_named: bool = False,
) -> Spec:
    """Build a Spec from labels per operand.

    ``inputs``: schema name -> one label per axis (a string of one-letter labels, or a
    list; a tuple of labels is a merged axis; None a whole axis), or a list of these
    for a tensor list. Their order is the operands' order; other tensors follow, whole,
    or are left out with ``only_named`` (they give a shape or dtype, not data).
    Axes of size 1 are whole (broadcast). ``sizes`` gives those not readable from a
    plain axis. Raises :class:`RuleMismatch` where shapes disagree.
    """
    build = _Builder(sizes)
    chosen: dict[int, Labels] = {}
    for name, labels in inputs.items():
        value = call.args.get(name)
        if isinstance(value, Ref):
            chosen[value.index] = labels  # type: ignore[assignment]
        elif items(value) is not None:
            for item, item_labels in zip(call.refs(name), labels, strict=True):
                chosen[item.index] = item_labels  # type: ignore[assignment]
    rest = [] if only_named else [t.index for t in call.tensors]
    order = [*chosen, *(index for index in rest if index not in chosen)]
    for index, labels in chosen.items():
        build.collect(labels, call.tensors[index].shape)
    for labels, shape in zip(outputs, call.outputs, strict=False):
        build.collect(labels, shape)
    made_inputs: list[tuple[Axis, ...]] = []
    for index in order:
        shape = call.tensors[index].shape
        labels = chosen.get(index, [None] * len(shape))
        made_inputs.append(
            tuple(build.axis(x, n) for x, n in zip(labels, shape, strict=True))
        )
    made_outputs: list[tuple[Axis, ...]] = []
    for position, shape in enumerate(call.outputs):
        labels = outputs[position] if position < len(outputs) else [None] * len(shape)
        made_outputs.append(
            tuple(build.axis(x, n) for x, n in zip(labels, shape, strict=True))
        )
    live = {d for axes in made_inputs + made_outputs for a in axes for d in a.dims}
    dims: dict[str, tuple[int, DimKind]] = {}
    for label in build.used:
        if label in live:
            what = DimKind.PARALLEL
            if label in reduction:
                what = DimKind.REDUCTION
            elif label in coupled:
                what = DimKind.COUPLED
            dims[label] = (build.sizes[label], what)
    return Spec(kind, dims, made_inputs, made_outputs, tuple(order), dict(attrs or {}))


def whole(call: Call, kind: OpKind) -> Spec:
    """A space without dims: every operand whole."""
    return space(call, kind, {}, [])
