"""Write out the layers that a depth-reduced trace left out.

The trace holds two units of every run of equal layers; unit 1 is copied for the rest.
Requires the whole model's parameters among ``graph.tensors``. Ensures the graph equals,
name by name, the lowering of the whole model: a copy's tensors come from the copy
before it where unit 1's come from unit 0, parameters are renamed to the layer's own,
and node names continue torch.fx's numbering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.errors import PassError
from passes.ir import Op, Operand, OpGraph, Tensor, TensorKind
from passes.traced import LayerRun

_NUMBER = re.compile(r"^(.*?)(?:_(\d+))?((?:\.\w+)?)$", re.DOTALL)


def _parse(name: str) -> tuple[str, int, str]:
    """Base, number and rest: ("linear", 4, "") of ``linear_4``, .. ".0" of a part."""
    found = _NUMBER.match(name)
    assert found is not None
    return found[1], int(found[2] or 0), found[3]


def _shifted(name: str, steps: Mapping[str, int], times: int) -> str:
    base, number, rest = _parse(name)
    step = steps.get(base, 0)
    if not step or not times:
        return name
    number += step * times
    return f"{base}_{number}{rest}" if number else f"{base}{rest}"


@dataclass(frozen=True, slots=True)
class _Span:
    """Ops of unit 0 are ``[first, second)``, of unit 1 ``[second, stop)``."""

    first: int
    second: int
    stop: int


def _within(module: str, paths: Sequence[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in paths)


def _unit_paths(run: LayerRun, unit: int) -> list[str]:
    children = run.original[unit * run.period : (unit + 1) * run.period]
    return [run.path(c) for c in children]


def _find(ops: Sequence[Op], run: LayerRun) -> _Span:
    zero, one = (
        [i for i, op in enumerate(ops) if _within(op.module, _unit_paths(run, u))]
        for u in (0, 1)
    )
    if not zero or not one:
        raise PassError(
            "a run of layers has no ops", run.prefix, "Trace without depth reduction"
        )
    length = one[0] - zero[0]
    starts = _Span(zero[0], one[0], one[0] + length)
    length = one[-1] - zero[-1]
    ends = _Span(zero[-1] + 1 - length, zero[-1] + 1, one[-1] + 1)
    for span in (starts, ends):
        inside = span.first >= 0 and span.stop <= len(ops)
        if inside and zero[0] >= span.first and one[-1] < span.stop:
            a, b = ops[span.first : span.second], ops[span.second : span.stop]
            if len(a) == len(b) and all(
                x.target == y.target and x.kind == y.kind
                for x, y in zip(a, b, strict=True)
            ):
                return span
    raise PassError(
        "the two traced units of a run of layers differ",
        run.prefix,
        "Trace without depth reduction",
    )


def _rename_path(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        if text == old or text.startswith(old + "."):
            return new + text[len(old) :]
    return text


class _Copier:
    """Copies unit 1 of one run, and moves what follows it."""

    def __init__(self, graph: OpGraph, run: LayerRun) -> None:
        self.graph, self.run = graph, run
        self.span = span = _find(graph.ops, run)
        self.zero = graph.ops[span.first : span.second]
        self.one = graph.ops[span.second : span.stop]
        self.tensors = {t.name: t for t in graph.tensors}
        # names made in a unit, by position
        self.made_zero = [n for op in self.zero for n in _made(op, self.tensors)]
        self.made_one = [n for op in self.one for n in _made(op, self.tensors)]
        assert len(self.made_zero) == len(self.made_one), run.prefix
        self.steps = self._steps()

    def _steps(self) -> dict[str, int]:
        """How far each base name's number moves from one unit to the next."""
        steps: dict[str, int] = {}
        names_zero = [op.name for op in self.zero] + self.made_zero
        names_one = [op.name for op in self.one] + self.made_one
        for a, b in zip(names_zero, names_one, strict=True):
            base, number, _ = _parse(a)
            other, later, _ = _parse(b)
            if base == other:
                steps.setdefault(base, later - number)
        return steps

    def units(self) -> tuple[list[Op], list[Tensor], dict[str, str]]:
        """Ops and tensors of units 2 onwards, and the last unit's names by unit 1's."""
        ops: list[Op] = []
        tensors: list[Tensor] = []
        before = dict(zip(self.made_zero, self.made_one, strict=True))
        mine = {n: n for n in self.made_one}
        old = _unit_paths(self.run, 1)
        for unit in range(2, self.run.units):
            pairs = list(zip(old, _unit_paths(self.run, unit), strict=True))
            mine = {
                n: _shifted(n, self.steps, unit - 1)
                if _shifted(n, self.steps, 1) != n
                else f"{n}@{unit}"
                for n in self.made_one
            }
            names = before | mine
            for name, new in mine.items():
                tensors.append(replace(self.tensors[name], name=new))
            ops += [self._copy(op, names, pairs, unit - 1) for op in self.one]
            before = {
                z: mine[o] for z, o in zip(self.made_zero, self.made_one, strict=True)
            }
        return ops, tensors, mine

    def _copy(
        self,
        op: Op,
        names: Mapping[str, str],
        pairs: Sequence[tuple[str, str]],
        times: int,
    ) -> Op:
        def tensor(name: str) -> str:
            found = names.get(name)
            return found if found is not None else self._leaf(name, pairs)

        return renamed(
            op,
            _shifted(op.name, self.steps, times),
            tensor,
            _rename_path(op.module, pairs),
        )

    def _leaf(self, name: str, pairs: Sequence[tuple[str, str]]) -> str:
        new = _rename_path(name, pairs)
        return new if new in self.tensors else name


def _made(op: Op, tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that an op owns: its outputs and what it keeps out of sight."""
    hidden = [o.tensor for o in op.saved if tensors[o.tensor].kind is TensorKind.SAVED]
    return [*op.outputs, *dict.fromkeys(hidden)]


def renamed(op: Op, name: str, tensor: Callable[[str], str], module: str) -> Op:
    """The op under other names; ``tensor`` maps a tensor's name."""

    def operands(items: Sequence[Operand]) -> tuple[Operand, ...]:
        return tuple(Operand(tensor(o.tensor), o.axes) for o in items)

    attrs = op.attrs
    if any(k == "weight" for k, _ in attrs):
        attrs = tuple(
            (k, tensor(str(v)) if k == "weight" and v else v) for k, v in attrs
        )
    return replace(
        op,
        name=name,
        inputs=tuple(tensor(n) for n in op.inputs),
        outputs=tuple(tensor(n) for n in op.outputs),
        space=replace(
            op.space,
            inputs=operands(op.space.inputs),
            outputs=operands(op.space.outputs),
        ),
        saved=operands(op.saved),
        module=module,
        attrs=attrs,
    )


def _expand_run(graph: OpGraph, run: LayerRun) -> OpGraph:
    if run.units <= 2:
        return graph
    copier = _Copier(graph, run)
    span = copier.span
    ops, tensors, last = copier.units()
    steps, times = copier.steps, run.units - 2
    # what follows: its own names move on, its inputs come from the last unit
    tail = graph.ops[span.stop :]
    owned = [n for op in tail for n in _made(op, copier.tensors)]
    moved = {n: _shifted(n, steps, times) for n in owned}
    names = last | moved

    def tensor(name: str) -> str:
        return names.get(name, name)

    after = [
        renamed(op, _shifted(op.name, steps, times), tensor, op.module) for op in tail
    ]
    kept = [t for t in graph.tensors if t.name not in moved]
    ends = [replace(copier.tensors[n], name=moved[n]) for n in dict.fromkeys(owned)]
    return replace(
        graph,
        ops=(*graph.ops[: span.stop], *ops, *after),
        tensors=(*kept, *tensors, *ends),
        outputs=tuple(tensor(n) for n in graph.outputs),
        blocks=(),
    )


def expand(graph: OpGraph, runs: Sequence[LayerRun]) -> OpGraph:
    """The whole model's graph from one whose runs hold two units each.

    Raises :class:`PassError` where a run's two units do not agree.
    """
    for run in runs:
        graph = _expand_run(graph, run)
    return graph
