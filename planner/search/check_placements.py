"""The placement rules of :mod:`planner.search.check`.

From shapes and placements alone: every shard divides, an op reads a parameter as the
parameter lies, a matrix product's operands agree, a move between two placements has its
collective, and each stage's parameter bytes are those of the tensors it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

from passes.ir import DTYPE_BYTES
from planner.errors import PlannerError
from planner.plan.documents import Plan
from planner.plan.names import (
    expand,
    local_elements,
    parse_placement,
    placement_error,
)
from planner.plan.records import OperandRecord, PlacementRecord
from planner.search.placements import REPLICATED, Placement, reshard
from planner.search.violation import Violation
from planner.workload import MESH_AXES

#: Axes on which one tensor's ranks hold the same samples and parameters' slices.
INNER_AXES = ("cp", "ep", "tp")
#: Padding, and ZeRO's rounding of uneven tensors.
PARAMETER_TOLERANCE = 0.02

Rules = tuple[tuple[str, Callable[[Plan], Iterator[Violation]]], ...]


def placement_rules() -> Rules:
    """The rules, in order, with their names."""
    return (
        ("placements", _legal),
        ("placements", _parameters_as_they_lie),
        ("placements", _products),
        ("placements", _moves),
        ("memory", _parameter_bytes),
    )


def _size(plan: Plan, axis: str) -> int:
    return plan.parallelism.ep if axis == "ep" else plan.mesh.size(axis)


def _legal(plan: Plan) -> Iterator[Violation]:
    """Axes exist, texts parse, shards divide, wildcards list layers."""
    for name, record in plan.placements.items():
        wild = "*" in name
        if wild != (record.layers is not None):
            yield Violation("placements", name, "a * goes with a list of layers")
            continue
        try:
            expand(name, record.layers)
        except PlannerError as error:
            yield Violation("placements", name, str(error))
        if record.what != "op" and (record.inputs or len(record.outputs) != 1):
            yield Violation("placements", name, "a tensor has one output, itself")
        for operand in record.inputs + record.outputs:
            for axis, text in operand.placement.items():
                if axis not in (*MESH_AXES, "ep"):
                    yield Violation("placements", name, f"no mesh axis {axis!r}")
                    continue
                # ZeRO divides the flattened tensors, whatever their shape
                flat = axis.startswith("dp_") and record.what != "op"
                problem = placement_error(
                    text, operand.shape, _size(plan, axis), operand.padded or flat
                )
                if problem:
                    yield Violation(
                        "placements", name, f"{operand.tensor} on {axis}: {problem}"
                    )
            if record.what != "op" and "P(sum)" in operand.placement.values():
                yield Violation("placements", name, "a stored tensor is no pending sum")


def _inner(placement: Mapping[str, str]) -> dict[str, str]:
    return {
        axis: text
        for axis, text in placement.items()
        if axis in INNER_AXES and text != "R"
    }


def _stored(plan: Plan) -> dict[str, tuple[OperandRecord, PlacementRecord]]:
    """Full name of every parameter and buffer, aliases too, to its record."""
    result: dict[str, tuple[OperandRecord, PlacementRecord]] = {}
    for name, record in plan.placements.items():
        if record.what != "op" and len(record.outputs) == 1:
            for full in _expanded(name, record):
                result[full] = (record.outputs[0], record)
    for owner, aliases in plan.model.tied.items():
        if owner in result:
            for alias in aliases:
                result.setdefault(alias, result[owner])
    return result


def _expanded(name: str, record: PlacementRecord) -> tuple[str, ...]:
    try:
        return expand(name, record.layers)
    except PlannerError:
        return ()


def _parameters_as_they_lie(plan: Plan) -> Iterator[Violation]:
    """An op reads each parameter with the placement and shape that it is stored in."""
    stored = _stored(plan)
    for name, record in plan.placements.items():
        if record.what != "op":
            continue
        for operand in record.inputs:
            wild = record.layers if "*" in operand.tensor else None
            try:
                full_names = expand(operand.tensor, wild)
            except PlannerError:
                continue
            for full in full_names:
                if full not in stored:
                    continue
                tensor = stored[full][0]
                if tensor.shape != operand.shape:
                    yield Violation(
                        "placements",
                        name,
                        f"reads {full} as {operand.shape}, it is {tensor.shape}",
                    )
                elif _inner(tensor.placement) != _inner(operand.placement):
                    yield Violation(
                        "placements",
                        name,
                        f"reads {full} as {_inner(operand.placement) or 'R'}, it lies "
                        f"as {_inner(tensor.placement) or 'R'}",
                    )
                    break


def _on(operand: OperandRecord, axis: str) -> Placement:
    return parse_placement(operand.placement.get(axis, "R"))


def _products(plan: Plan) -> Iterator[Violation]:
    """y = x W^T: rows of W give columns of y, its columns a pending sum."""
    for name, record in plan.placements.items():
        if record.target != "aten.linear.default" or len(record.inputs) < 2:
            continue
        x, weight, y = record.inputs[0], record.inputs[1], record.outputs[0]
        if not x.shape or not y.shape or len(weight.shape) != 2:
            continue
        for axis in INNER_AXES:
            try:
                a, w, c = _on(x, axis), _on(weight, axis), _on(y, axis)
            except PlannerError:
                continue  # reported by _legal
            if not _product_agrees(a, w, c, len(x.shape) - 1, len(y.shape) - 1):
                yield Violation(
                    "placements",
                    name,
                    f"on {axis}: {a} times weight {w} is not {c}",
                )


def _product_agrees(a: Placement, w: Placement, c: Placement, k: int, n: int) -> bool:
    """x is (..., k), W is (n, k), y is (..., n): one axis divides n, k, or the rest."""
    if w.kind == "S" and w.axis == 0:
        return a.kind == "R" and c == Placement("S", n, w.outer, w.parts)
    if w.kind == "S":
        return c.kind == "P" and a == Placement("S", k, w.outer, w.parts)
    if a.kind == "S":
        return a.axis != k and c == a
    return c == a


def _moves(plan: Plan) -> Iterator[Violation]:
    """Where a tensor is read otherwise than it was made, a collective moves it."""
    made: dict[str, OperandRecord] = {}
    for record in plan.placements.values():
        if record.what == "op":
            made.update({o.tensor: o for o in record.outputs})
    present = {(c.axis, c.kind) for c in plan.collectives}
    missing: dict[tuple[str, str], str] = {}
    for name, record in plan.placements.items():
        for operand in record.inputs if record.what == "op" else ():
            source = made.get(operand.tensor)
            if source is None:
                continue
            for axis in INNER_AXES:
                size = _size(plan, axis)
                try:
                    src, dst = _on(source, axis), _on(operand, axis)
                except PlannerError:
                    continue
                move = reshard(src, dst, 1.0, size) if size > 1 else None
                if size > 1 and move is None:
                    yield Violation(
                        "placements", name, f"{operand.tensor}: {src} can not be {dst}"
                    )
                elif move and move.kind and (axis, move.kind) not in present:
                    missing.setdefault((axis, move.kind), f"{name}: {src} to {dst}")
    for (axis, kind), where in missing.items():
        yield Violation("placements", where, f"no {kind} on {axis} among collectives")


def _fraction(plan: Plan, operand: OperandRecord) -> float:
    """Share of a stored tensor on one rank."""
    result = 1.0
    for axis, text in operand.placement.items():
        size = _size(plan, axis)
        if parse_placement(text) == REPLICATED:
            continue
        even = axis.startswith("dp_")
        if axis == "dp_shard" and "ep" in operand.placement:
            size = max(1, size // plan.parallelism.ep)  # ep reuses these ranks
        result *= 1 / size if even else local_elements(text, operand.shape, size)
    return result


def _parameter_bytes(plan: Plan) -> Iterator[Violation]:
    """All parameters are placed, and a stage's line is what its tensors take."""
    held: dict[str, float] = {block.name: 0.0 for block in plan.model.blocks}
    stage_of = {name: k for k, s in enumerate(plan.stages) for name in s.blocks}
    bytes_per_stage = [0.0] * len(plan.stages)
    elements = 0
    for name, record in plan.placements.items():
        if record.what != "parameter" or len(record.outputs) != 1:
            continue
        operand = record.outputs[0]
        if record.dtype not in DTYPE_BYTES:
            yield Violation("memory", name, f"unknown dtype {record.dtype!r}")
            return
        try:
            size = prod(operand.shape) * DTYPE_BYTES[record.dtype]
            local = size * _fraction(plan, operand)
        except (PlannerError, IndexError):
            return  # reported by _legal
        numbers = _expanded(name, record)
        elements += prod(operand.shape) * len(numbers)
        for i in range(len(numbers)):
            blocks = {_expanded_block(b, record, i) for b in record.blocks}
            if not blocks or not blocks <= held.keys():
                yield Violation("memory", name, f"no such blocks: {sorted(blocks)}")
                return
            for stage in {stage_of.get(b) for b in blocks} - {None}:
                assert stage is not None
                bytes_per_stage[stage] += local
    if elements != plan.model.parameters:
        yield Violation(
            "memory",
            "placements",
            f"place {elements} of {plan.model.parameters} parameters",
        )
        return
    for s, expected in zip(plan.stages, bytes_per_stage, strict=True):
        line = s.memory.parameters_bytes
        if abs(line - expected) > PARAMETER_TOLERANCE * expected + 2**20:
            yield Violation(
                "memory",
                f"stage {s.index}",
                f"parameters_bytes is {line}, its tensors take {expected:.0f}",
            )


def _expanded_block(block: str, record: PlacementRecord, number: int) -> str:
    return expand(block, record.layers)[number] if "*" in block else block
