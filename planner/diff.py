"""Two plans side by side, term by term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.plan.documents import Document, Plan
from planner.plan.records import MEMORY_LINES
from planner.plan.summary import PART_NAMES, gib, seconds
from planner.workload import DEGREES, Training

WIDTH = 80
NAME = 27


@dataclass(frozen=True, slots=True)
class Row:
    """``name`` in A and in B; ``change`` in words (empty where there is none)."""

    name: str
    a: str
    b: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: tuple[Row, ...]


def diff(a: Document, b: Document) -> tuple[Section, ...]:
    """What differs, section by section; times and memory in full where they do."""
    sections = (
        Section("Job", _job(a, b)),
        Section("Split", _split(a, b)),
        Section("Step", _step(a, b)),
        Section("Rates", _rates(a, b)),
        Section("Memory of the fullest stage", _memory(a, b)),
        Section("Placements", _placements(a, b)),
        Section("Traffic per GPU and step", _traffic(a, b)),
        Section("Certificate", _certificate(a, b)),
    )
    return tuple(s for s in sections if s.rows)


def render(sections: tuple[Section, ...], a: str, b: str) -> str:
    """Text of at most 80 columns."""
    lines = [f"A  {a}"[:WIDTH], f"B  {b}"[:WIDTH]]
    if not sections:
        return "\n".join([*lines, "", "no difference"]) + "\n"
    for section in sections:
        lines += ["", section.title]
        for r in section.rows:
            line = f"  {r.name[:NAME]:<{NAME}} {r.a:>15} {r.b:>15}  {r.change}".rstrip()
            if len(line) <= WIDTH:
                lines.append(line)
            else:
                lines.append(f"  {r.name}"[:WIDTH])
                lines += [f"    {m}  {v}"[:WIDTH] for m, v in (("A", r.a), ("B", r.b))]
    return "\n".join(lines) + "\n"


def _changed(name: str, a: object, b: object, change: str = "") -> list[Row]:
    return [] if a == b else [Row(name, _text(a), _text(b), change)]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return "-" if value is None else str(value)


def _share(a: float, b: float) -> str:
    if a == 0:
        return "new" if b else ""
    return f"{b / a - 1:+.1%}"


def _job(a: Document, b: Document) -> tuple[Row, ...]:
    rows = _changed("model", a.model.name, b.model.name)
    rows += _changed("graph", a.model.graph_hash[:12], b.model.graph_hash[:12])
    rows += _changed("cluster", a.cluster.text, b.cluster.text)
    rows += _changed("GPUs", a.cluster.num_gpus, b.cluster.num_gpus)
    rows += _changed("software", a.provenance.stack, b.provenance.stack)
    if isinstance(a.workload, Training) and isinstance(b.workload, Training):
        for name in ("global_batch", "seq_len", "precision", "optimizer"):
            left, right = getattr(a.workload, name), getattr(b.workload, name)
            rows += _changed(name.replace("_", " "), left, right)
    else:
        rows += _changed("workload", a.workload.kind, b.workload.kind)
    return tuple(rows)


def _split(a: Document, b: Document) -> tuple[Row, ...]:
    rows: list[Row] = []
    for name in (
        *DEGREES,
        "vpp",
        "zero",
        "micro_batch_size",
        "num_micro_batches",
        "schedule",
        "sequence_parallel",
    ):
        left, right = getattr(a.parallelism, name), getattr(b.parallelism, name)
        rows += _changed(name.replace("_", " "), left, right)
    left, right = (tuple(len(s.blocks) for s in d.stages) for d in (a, b))
    rows += _changed("blocks per stage", left, right)
    rows += _changed("recompute", _modes(a), _modes(b))
    return tuple(rows)


def _modes(d: Document) -> str:
    found: dict[str, int] = {}
    for mode in d.recompute.values():
        found[mode] = found.get(mode, 0) + 1
    return ", ".join(f"{n} {mode}" for mode, n in sorted(found.items())) or "none"


def _step(a: Document, b: Document) -> tuple[Row, ...]:
    x, y = a.estimate, b.estimate
    if x.step_time_s == y.step_time_s and x.breakdown == y.breakdown:
        return ()
    rows: list[Row] = []
    left, right = x.breakdown.parts(), y.breakdown.parts()
    order = sorted(left, key=lambda n: -abs(right[n] - left[n]))
    for name in order:
        if left[name] == right[name]:
            continue
        change = right[name] - left[name]
        shown = f"{'+' if change >= 0 else '-'}{seconds(abs(change))}"
        values = (seconds(left[name]), seconds(right[name]))
        rows.append(Row(PART_NAMES[name], *values, shown))
    total = _share(x.step_time_s, y.step_time_s)
    rows.append(Row("step", seconds(x.step_time_s), seconds(y.step_time_s), total))
    return tuple(rows)


def _rates(a: Document, b: Document) -> tuple[Row, ...]:
    x, y = a.estimate, b.estimate
    percent: Callable[[float], str] = lambda v: f"{v:.1%}"  # noqa: E731
    plain: Callable[[float], str] = lambda v: f"{v:.4g}"  # noqa: E731
    rows: list[Row] = []
    for name, left, right, form in (
        ("MFU", x.mfu, y.mfu, percent),
        ("HFU", x.hfu, y.hfu, percent),
        ("samples/s", x.samples_per_s, y.samples_per_s, plain),
        ("tokens/s per GPU", x.tokens_per_s_per_gpu, y.tokens_per_s_per_gpu, plain),
        ("US$ per hour", x.cost_per_hour or 0, y.cost_per_hour or 0, plain),
        ("US$ per 1M samples", _dollars(a), _dollars(b), plain),
    ):
        if left != right:
            rows.append(Row(name, form(left), form(right), _share(left, right)))
    return tuple(rows)


def _dollars(d: Document) -> float:
    e = d.estimate
    return (e.cost_per_hour or 0.0) / 3600 / e.samples_per_s * 1e6


def _memory(a: Document, b: Document) -> tuple[Row, ...]:
    x, y = (
        max(d.estimate.memory_per_stage, key=lambda m: m.total_bytes - m.limit_bytes)
        for d in (a, b)
    )
    rows: list[Row] = []
    for name in (*MEMORY_LINES, "total_bytes", "limit_bytes"):
        left, right = getattr(x, name), getattr(y, name)
        if left == right:
            continue
        change = f"{'+' if right >= left else '-'}{gib(abs(right - left))}"
        label = name.removesuffix("_bytes").replace("_", " ")
        rows.append(Row(label, gib(left), gib(right), change))
    return tuple(rows)


def _placements(a: Document, b: Document) -> tuple[Row, ...]:
    rows: list[Row] = []
    for name in sorted({*a.placements, *b.placements}):
        left, right = a.placements.get(name), b.placements.get(name)
        texts = [
            "-"
            if r is None
            else "; ".join(
                ",".join(f"{k} {v}" for k, v in sorted(o.placement.items())) or "R"
                for o in r.outputs
            )
            for r in (left, right)
        ]
        rows += _changed(name, texts[0], texts[1])
    if len(rows) > 24:
        more = len(rows) - 24
        rows = [*rows[:24], Row(f"and {more} more", "", "")]
    return tuple(rows)


def _traffic(a: Document, b: Document) -> tuple[Row, ...]:
    x, y = traffic(a), traffic(b)
    rows: list[Row] = []
    for axis in sorted({*x, *y}):
        left, right = x.get(axis, 0.0), y.get(axis, 0.0)
        if left != right:
            shown = (f"{left / 1e9:.4g} GB", f"{right / 1e9:.4g} GB")
            rows.append(Row(axis, *shown, _share(left, right)))
    return tuple(rows)


def traffic(d: Document) -> dict[str, float]:
    """Bytes that collectives of each axis name in a step, on the busiest stage."""
    found: dict[tuple[str, int], float] = {}
    for c in d.collectives:
        key = (c.axis, c.stage)
        found[key] = found.get(key, 0.0) + c.bytes * c.count_per_step
    result: dict[str, float] = {}
    for (axis, _), value in found.items():
        result[axis] = max(result.get(axis, 0.0), value)
    return result


def _certificate(a: Document, b: Document) -> tuple[Row, ...]:
    if not (isinstance(a, Plan) and isinstance(b, Plan)):
        return ()
    x, y = a.certificate, b.certificate
    return tuple(
        _changed("status", x.status, y.status)
        + _changed("gap", f"{x.gap:.2%}", f"{y.gap:.2%}")
        + _changed("shapes", x.enumerated, y.enumerated)
        + _changed("solved", x.solved, y.solved)
    )
