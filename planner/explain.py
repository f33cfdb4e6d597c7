"""Why a plan is as it is, in words: what binds, where the time goes, what lost."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from planner.plan.documents import Document, Plan, Prediction
from planner.plan.records import AlternativeRecord, CollectiveRecord
from planner.plan.summary import (
    PART_NAMES,
    WIDTH,
    certificate_line,
    gib,
    seconds,
    split_line,
)

#: MFU of a well-tuned training run, and the mark under which something is wrong.
GOOD_MFU = (0.40, 0.55)
POOR_MFU = 0.30
#: Less spare memory than this share of the limit: memory binds.
TIGHT = 0.10
COMMUNICATION = ("tp_comm", "cp_comm", "ep_comm", "dp_comm_exposed", "pp_p2p")
#: Shares below this are not worth a line.
SMALL = 0.005


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its paragraphs (plain text, not wrapped)."""

    title: str
    lines: tuple[str, ...]


def explain(document: Document) -> tuple[Section, ...]:
    """The sections in reading order."""
    if document.serving is not None:
        return _serving(document)
    sections = [
        Section("The split", (split_line(document),)),
        Section("What binds", (*_memory(document), *_balance(document))),
        Section("Where the time goes", tuple(_times(document))),
        Section("Utilisation", tuple(utilisation(document))),
        Section("Communication", tuple(_communication(document))),
    ]
    if isinstance(document, Prediction):
        sections.append(Section("Verdict", (document.verdict.message,)))
    if isinstance(document, Plan):
        certificate = certificate_line(document.certificate)
        sections.append(Section("How good it is", (certificate,)))
        lost = [_lost(document, other) for other in document.alternatives]
        near = closest(document)
        if near is not None:
            sections.append(near)
        if lost:
            sections.append(Section("What lost, and why", tuple(lost)))
    if document.warnings:
        sections.append(Section("Warnings", document.warnings))
    return tuple(sections)


def _serving(document: Document) -> tuple[Section, ...]:
    """A serving plan: its summary's facts under the same headings."""
    r = document.serving
    assert r is not None
    from planner.serving.summary import summary

    sections = [
        Section("How it is served", tuple(summary(document).splitlines())),
        Section("What binds", (r.binds, *r.notes)),
    ]
    if isinstance(document, Plan):
        lost = tuple(a.why for a in document.alternatives)
        sections.append(Section("What lost, and why", lost or ("nothing else fits",)))
    return tuple(sections)


def render(sections: tuple[Section, ...]) -> str:
    """Plain text of at most 80 columns."""
    blocks: list[str] = []
    for section in sections:
        body = [
            textwrap.fill(
                line,
                WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
            for line in section.lines
        ]
        blocks.append("\n".join([section.title, *body]))
    return "\n\n".join(blocks) + "\n"


def op_sections(document: Document, name: str) -> tuple[Section, ...]:
    """One op: its placement, price and collectives, and what else it could be.

    Prices the model again. Raises PlannerError for a name that the plan has not.
    """
    from planner.whatif import Base, op_story, resolve

    key = resolve(document, name)
    record, story = document.placements[key], op_story(Base.of(document), key)
    span = f" of layers {record.layers}" if record.layers else ""
    lies = [f"{key}{span}: {record.target}"]
    for what, operands in (("reads", record.inputs), ("writes", record.outputs)):
        for o in operands:
            axes = ", ".join(f"{a} {t}" for a, t in sorted(o.placement.items())) or "R"
            shape = " x ".join(map(str, o.shape)) or "scalar"
            lies.append(f"{what} {o.tensor} [{shape}]: {axes}")
    each = story.forward_s + story.backward_s
    price = [
        f"{seconds(story.forward_s)} forward and {seconds(story.backward_s)} backward "
        "on one rank for one micro-batch"
    ]
    if story.flops and each:
        price.append(
            f"{story.flops / 1e12:.4g} TFLOP, {story.utilization:.1%} of the dense peak"
        )
    calls: dict[str, None] = {}
    for c in document.collectives:
        if c.where == key:
            calls[_call(c, 1)] = None
    best = next((c.block_s for c in story.choices if c.chosen), None)
    rows: list[str] = []
    for c in story.choices:
        mark = " (chosen)" if c.chosen else ""
        if c.block_s is None or best is None:
            rows.append(f"{c.label}{mark}: no legal block has it")
            continue
        change = "" if c.chosen else f" ({c.block_s / best - 1:+.2%})"
        rows.append(
            f"{c.label}{mark}: op {seconds(c.op_s)}, block {seconds(c.block_s)}{change}"
        )
    sections = [Section("Placement", tuple(lies)), Section("Price", tuple(price))]
    if calls:
        sections.append(Section("Collectives at it", tuple(calls)))
    title = "Placements it could have (the block's other ops at their best for each)"
    return (*sections, Section(title, tuple(rows)))


def gain_section(document: Document) -> Section:
    """What a little more hardware would buy; prices the model again."""
    from planner.whatif import Base, gains

    lines: list[str] = []
    base = Base.of(document)
    now, said = base.priced.terms.total_s, document.estimate.step_time_s
    if abs(now / said - 1) > 1e-3:
        lines.append(
            f"Priced again the step is {seconds(now)}; the file says {seconds(said)}."
        )
    for gain in gains(base):
        if gain.saved > 5e-5:
            lines.append(
                f"{gain.what}: {seconds(gain.step_s)}, {gain.saved:.2%} off the step"
            )
        else:
            lines.append(f"{gain.what}: nothing")
    return Section("What more hardware would buy, in the same shape", tuple(lines))


def closest(plan: Plan) -> Section | None:
    """The alternative that comes closest, and the settings in which it differs."""
    fitting = [a for a in plan.alternatives if a.fits]
    if not fitting:
        return None

    def changes(other: AlternativeRecord) -> list[str]:
        mine, theirs = plan.parallelism, other.parallelism
        names = ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard", "vpp", "zero")
        return [
            f"{n.replace('_', ' ')} {getattr(mine, n)} -> {getattr(theirs, n)}"
            for n in (*names, "micro_batch_size", "schedule")
            if getattr(mine, n) != getattr(theirs, n)
        ]

    fewest = min(fitting, key=lambda a: (len(changes(a)), a.step_time_s))
    fastest = min(fitting, key=lambda a: a.step_time_s)
    lines: list[str] = []
    shown = (("Closest in time", fastest), ("Fewest changes", fewest))
    for label, other in shown[: 1 if fewest is fastest else 2]:
        slower = other.step_time_s / plan.estimate.step_time_s - 1
        what = ", ".join(changes(other)) or "stage cuts and recompute only"
        time = f"{seconds(other.step_time_s)} ({slower:+.1%})"
        lines.append(f"{label}: {what}; {time}; {_reason(other)}")
    return Section("What comes closest", tuple(lines))


def _memory(d: Document) -> list[str]:
    stages = d.estimate.memory_per_stage
    worst = max(
        range(len(stages)), key=lambda k: stages[k].total_bytes - stages[k].limit_bytes
    )
    memory = stages[worst]
    spare = memory.limit_bytes - memory.total_bytes
    lines = sorted(memory.lines().items(), key=lambda kv: -kv[1])
    top = " and ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} ({gib(value)})"
        for name, value in lines[:2]
        if value
    )
    state = (
        f"stage {worst} takes {gib(memory.total_bytes)} of {gib(memory.limit_bytes)}"
    )
    if spare < 0:
        return [
            f"Memory does not suffice: {state}, {gib(-spare)} too much; most is {top}."
        ]
    if spare < TIGHT * memory.limit_bytes:
        return [f"Memory binds: {state}, {gib(spare)} to spare; most is {top}."]
    return [f"Memory does not bind: {state}, {gib(spare)} to spare; most is {top}."]


def _balance(d: Document) -> list[str]:
    times = [s.forward_s + s.backward_s for s in d.stages]
    if len(times) == 1:
        return []
    longest, mean = max(times), sum(times) / len(times)
    worst = times.index(longest)
    if longest <= mean * 1.01:
        return [f"The {len(times)} stages are balanced to {longest / mean - 1:.1%}."]
    return [
        f"Stage {worst} sets the pace: {seconds(longest)} a micro-batch, "
        f"{longest / mean - 1:.1%} above the mean of {len(times)} stages."
    ]


def _times(d: Document) -> list[str]:
    total = d.estimate.step_time_s
    parts = sorted(d.estimate.breakdown.parts().items(), key=lambda kv: -kv[1])
    return [
        f"{PART_NAMES[name]:<27} {seconds(value):>9} {value / total:>6.1%}"
        for name, value in parts
        if value > 0
    ] + [f"{'step':<27} {seconds(total):>9}"]


def losses(d: Document) -> list[tuple[str, float]]:
    """What keeps MFU from 100 %, largest first: (what, share of the step).

    Compute counts only as far as it takes longer than its FLOPs at the dense peak.
    """
    e = d.estimate
    ideal = e.model_flops / (d.cluster.num_gpus * e.peak_flops_per_s)
    shares: list[tuple[str, float]] = []
    for name, value in e.breakdown.parts().items():
        lost = max(0.0, value - ideal) if name == "compute" else value
        label = "compute below peak" if name == "compute" else PART_NAMES[name]
        shares.append((label, lost / e.step_time_s))
    return sorted((s for s in shares if s[1] > SMALL), key=lambda s: (-s[1], s[0]))


def utilisation(d: Document) -> list[str]:
    """The verdict on MFU, and below the good range what eats the rest in order."""
    e = d.estimate
    peak = f"{e.peak_flops_per_s / 1e12:.4g} dense {e.peak_dtype} TFLOP/s"
    if e.mfu >= GOOD_MFU[1]:
        verdict = "better than most well-tuned runs"
    elif e.mfu >= GOOD_MFU[0]:
        verdict = "good"
    elif e.mfu >= POOR_MFU:
        verdict = "fair; well-tuned runs reach 40-55%"
    else:
        verdict = "low; well-tuned runs reach 40-55%"
    lines = [f"MFU {e.mfu:.1%} of {peak} per GPU: {verdict}. HFU is {e.hfu:.1%}."]
    if e.mfu < GOOD_MFU[0]:
        eaten = ", ".join(
            f"{what} {share:.1%} ({seconds(share * e.step_time_s)})"
            for what, share in losses(d)
        )
        lines.append(f"What eats the rest, in order: {eaten}.")
    return lines


def _communication(d: Document) -> list[str]:
    b, total = d.estimate.breakdown.parts(), d.estimate.step_time_s
    exposed = sum(b[name] for name in COMMUNICATION)
    lines = [f"{exposed / total:.1%} of the step waits for communication."]
    stages: dict[CollectiveRecord, int] = {}
    for c in d.collectives:
        where = re.sub(r"^stage \d+$", "a stage's end", c.where)
        anywhere = c.model_copy(update={"stage": 0, "where": where})
        stages[anywhere] = stages.get(anywhere, 0) + 1
    by_cost = sorted(stages, key=lambda c: -c.time_s * c.count_per_step)
    lines += [_call(c, stages[c]) for c in by_cost[:5]]
    return lines


def _call(c: CollectiveRecord, stages: int) -> str:
    text = (
        f"{c.kind} on {c.axis} ({c.group_size} ranks) at {c.where}, {c.phase}: "
        f"{c.count_per_step} x {c.bytes / 1e6:.4g} MB, {seconds(c.time_s)} each"
    )
    return f"{text}, on {stages} stages" if stages > 1 else text


def _lost(plan: Plan, other: AlternativeRecord) -> str:
    label = f"{other.recipe}: " if other.recipe else ""
    label += other.parallelism.label()
    if not other.fits:
        return f"{label}: does not fit; {other.why}"
    slower = other.step_time_s / plan.estimate.step_time_s - 1
    return f"{label}: {seconds(other.step_time_s)} ({slower:+.1%}); {_reason(other)}"


def _reason(other: AlternativeRecord) -> str:
    """Why it lost, without the percentage that stands before it."""
    return re.sub(r"^\d+(\.\d+)?% slower: ", "", other.why)
