"""A plan as a screenful of plain text, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from planner.plan.records import MEMORY_LINES

if TYPE_CHECKING:
    from planner.plan.documents import Document
    from planner.plan.records import CertificateRecord

WIDTH = 80
#: Part of the breakdown to what a reader calls it.
PART_NAMES = {
    "compute": "compute",
    "tp_comm": "tensor-parallel comm",
    "cp_comm": "context-parallel comm",
    "ep_comm": "expert-parallel comm",
    "dp_comm_exposed": "exposed data-parallel comm",
    "pp_p2p": "pipeline sends",
    "pp_bubble": "pipeline bubble",
    "recompute": "recompute",
    "optimizer": "optimizer",
    "launch": "kernel launches",
}


def gib(nbytes: float) -> str:
    """Bytes as GiB with one decimal."""
    return f"{nbytes / 2**30:.1f} GiB"


def seconds(value: float) -> str:
    """A time with three figures and a fitting unit."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def count(value: float) -> str:
    """A count in words that fit: 175.2B, 340M."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.0f}"


def row(head: str, text: str) -> str:
    """One entry: a head of 11 columns, the text wrapped beside it."""
    return "\n".join(
        textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"{head:<11} ",
            subsequent_indent=" " * 12,
            break_long_words=True,
        )
    )


def summary(document: Document) -> str:
    """The whole text, newline at the end."""
    from planner.plan.documents import Plan, Prediction

    if document.serving is not None:
        from planner.serving.summary import summary as serving_summary

        return serving_summary(document)
    d, e = document, document.estimate
    lines = [
        row("model", f"{d.model.name}, {count(d.model.parameters)} parameters"),
        row("cluster", cluster_line(d)),
        row("workload", workload_line(d)),
        row("split", split_line(d)),
        row("stages", stages_line(d)),
        row("step", step_line(d)),
        row("of which", breakdown_line(d)),
        row("memory", memory_line(d)),
    ]
    if isinstance(d, Plan):
        lines.append(row("certificate", certificate_line(d.certificate)))
    if isinstance(d, Prediction):
        lines.append(row("verdict", d.verdict.message))
    lines.append(
        row(
            "MFU",
            f"{e.mfu:.1%} (HFU {e.hfu:.1%}) of {e.peak_flops_per_s / 1e12:.4g} dense "
            f"{e.peak_dtype} TFLOP/s per GPU",
        )
    )
    lines += [row("warning", text) for text in d.warnings]
    return "\n".join(lines) + "\n"


def cluster_line(d: Document) -> str:
    groups = " + ".join(
        f"{g.nodes} x {g.gpus_per_node} {g.device} over {g.link}"
        for g in d.cluster.groups
    )
    many = sum(g.nodes for g in d.cluster.groups) > 1
    network = f", {d.cluster.network} between nodes" if many else ""
    return f"{d.cluster.text}: {groups}{network}"


def workload_line(d: Document) -> str:
    w = d.workload
    if w.kind == "training":
        tokens = f" x {d.model.seq_len} tokens" if d.model.seq_len else ""
        return (
            f"training, {w.global_batch} samples{tokens} a step, {w.precision}, "
            f"{w.optimizer}"
        )
    return (
        f"inference, {w.prompt_len} prompt + {w.output_len} output tokens, "
        f"{w.weights} weights"
    )


def split_line(d: Document) -> str:
    p = d.parallelism
    text = p.label()
    if p.num_micro_batches:
        text += f" x {p.num_micro_batches}"
    if p.pp > 1:
        text += f", {p.schedule}"
    if p.tp > 1 and p.sequence_parallel:
        text += ", sequence parallel"
    return f"{text}, {recompute_line(d)}"


def recompute_line(d: Document) -> str:
    modes = list(d.recompute.values())
    found = [f"{m} in {modes.count(m)}" for m in ("selective", "full") if m in modes]
    if not found:
        return "no recompute"
    return f"recompute {' and '.join(found)} of {len(d.model.blocks)} blocks"


def stages_line(d: Document) -> str:
    sizes = [len(s.blocks) for s in d.stages]
    if len(sizes) == 1:
        return f"1, all {sizes[0]} blocks"
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    shown = ", ".join(f"{n} x {s}" if n > 1 else str(s) for s, n in runs)
    return f"{len(sizes)} with {shown} blocks"


def step_line(d: Document) -> str:
    e = d.estimate
    text = f"{seconds(e.step_time_s)}, {e.samples_per_s:.4g} samples/s"
    if e.tokens_per_s_per_gpu:
        text += f", {e.tokens_per_s_per_gpu:.4g} tokens/s per GPU"
    return text


def breakdown_line(d: Document) -> str:
    total = d.estimate.step_time_s
    parts = sorted(d.estimate.breakdown.parts().items(), key=lambda kv: -kv[1])
    shown = [
        f"{PART_NAMES[name]} {value / total:.1%}"
        for name, value in parts
        if value / total >= 5e-4
    ]
    return ", ".join(shown)


def memory_line(d: Document) -> str:
    stages = d.estimate.memory_per_stage
    worst = max(range(len(stages)), key=lambda k: stages[k].total_bytes)
    memory = stages[worst]
    lines = sorted(memory.lines().items(), key=lambda kv: -kv[1])
    shown = [
        f"{name.removesuffix('_bytes').replace('_', ' ')} {gib(value)}"
        for name, value in lines
        if value >= 0.05 * 2**30
    ]
    assert set(memory.lines()) == set(MEMORY_LINES)
    return (
        f"{gib(memory.total_bytes)} of {gib(memory.limit_bytes)} on stage {worst}: "
        + ", ".join(shown)
    )


def certificate_line(c: CertificateRecord) -> str:
    shapes = f"{c.enumerated} shapes: {c.solved} solved, {c.pruned} ruled out by bound"
    if c.infeasible:
        shapes += f", {c.infeasible} do not fit"
    if c.cut_off:
        shapes += f", {c.cut_off} cut off by the time limit"
    if c.status == "optimal":
        return f"optimal by the plan's own prices; {shapes}"
    return f"within {c.gap:.2%} of the best by the plan's own prices; {shapes}"
