"""The step as a timeline that Perfetto and chrome://tracing open.

The events are those of the discrete-event simulator behind the pipeline's price
(:mod:`cost_models.simulator`) with the plan's own stage times; what follows the last
backward (gradient sums, optimizer) is drawn after it. One process per pipeline stage,
whose ranks all do the same; times in microseconds, as the trace format has them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cost_models.pipeline import Event, Schedule, Timeline, simulate
from cost_models.schedules import Kind, rank_of, stage_of
from planner.plan.documents import Document

NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients"}
#: Reserved colour names of the trace viewer.
COLOURS = {
    Kind.F: "thread_state_running",
    Kind.B: "thread_state_runnable",
    Kind.W: "thread_state_iowait",
}


@dataclass(frozen=True, slots=True)
class Step:
    """``timeline`` of the pipeline and ``after_s`` seconds behind it; ``closed_s``: the
    closed form that the plan's step time uses."""

    timeline: Timeline
    after_s: float
    closed_s: float

    @property
    def total_s(self) -> float:
        return self.timeline.total_s + self.after_s


def step_of(document: Document) -> Step:
    """Simulates the plan's schedule with its stage times."""
    p, stages = document.parallelism, document.stages
    count = p.num_micro_batches or 1
    weights = [s.backward_weight_s for s in stages]
    known = [w for w in weights if w is not None]
    timeline = simulate(
        Schedule(p.schedule),
        [s.forward_s for s in stages],
        [s.backward_s for s in stages],
        [s.send_s for s in stages],
        count,
        p.vpp,
        backward_weight_s=known if len(known) == len(stages) else None,
    )
    after = document.estimate.after_pipeline_s
    return Step(timeline, after, document.estimate.step_time_s - after)


def trace_events(document: Document) -> list[dict[str, Any]]:
    """Events of the trace format: metadata, pieces of work, messages, the end."""
    step, stages = step_of(document), document.stages
    events: list[dict[str, Any]] = []
    for stage in stages:
        ranks = f"ranks {stage.ranks[0]}-{stage.ranks[-1]}" if stage.ranks else ""
        name = f"stage {stage.index} ({ranks})"
        events += [
            _meta("process_name", stage.index, 0, name),
            _sort(stage.index),
            _meta("thread_name", stage.index, 0, "compute"),
            _meta("thread_name", stage.index, 1, "messages"),
        ]
    for e in step.timeline.events:
        events.append(
            {
                "name": f"{e.kind.name}{e.micro}",
                "cat": NAMES[e.kind],
                "ph": "X",
                "pid": e.rank,
                "tid": 0,
                "ts": e.start_s * 1e6,
                "dur": (e.end_s - e.start_s) * 1e6,
                "cname": COLOURS[e.kind],
                "args": {"micro_batch": e.micro, "chunk": e.chunk},
            }
        )
        send = stages[e.rank].send_s if e.kind is Kind.F else stages[e.rank - 1].send_s
        if _moves(document, e) and send > 0:
            events.append(
                {
                    "name": f"send {e.kind.name}{e.micro}",
                    "cat": "message",
                    "ph": "X",
                    "pid": e.rank,
                    "tid": 1,
                    "ts": e.end_s * 1e6,
                    "dur": send * 1e6,
                }
            )
    end = step.timeline.total_s
    for name, seconds in after_parts(document):
        if seconds <= 0:
            continue
        for stage in stages:
            events.append(
                {
                    "name": name,
                    "cat": "after the pipeline",
                    "ph": "X",
                    "pid": stage.index,
                    "tid": 0,
                    "ts": end * 1e6,
                    "dur": seconds * 1e6,
                }
            )
        end += seconds
    return events


def after_parts(document: Document) -> tuple[tuple[str, float], ...]:
    """What follows the last backward: gradient sums, the optimizer, the host."""
    e = document.estimate
    rest, parts = e.after_pipeline_s, list[tuple[str, float]]()
    optimizer = min(rest, e.breakdown.optimizer)
    rest -= optimizer
    gradients = min(rest, e.breakdown.dp_comm_exposed)
    rest -= gradients
    parts.append(("exposed gradient reduction", gradients))
    if rest > 1e-12:
        parts.append(("other gradient sums and host work", rest))
    parts.append(("optimizer", optimizer))
    return tuple(parts)


def trace_json(document: Document) -> str:
    """The trace file's text."""
    step = step_of(document)
    meta = {
        "model": document.model.name,
        "cluster": document.cluster.text,
        "step_time_s": document.estimate.step_time_s,
        "simulated_s": step.total_s,
        "note": "one process per pipeline stage; from the simulator that backs the "
        "closed form of the price",
    }
    return (
        json.dumps(
            {
                "traceEvents": trace_events(document),
                "displayTimeUnit": "ms",
                "otherData": meta,
            },
            separators=(",", ":"),
        )
        + "\n"
    )


def _meta(name: str, pid: int, tid: int, label: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": label}}


def _sort(pid: int) -> dict[str, Any]:
    args = {"sort_index": pid}
    return {"name": "process_sort_index", "ph": "M", "pid": pid, "args": args}


def _moves(document: Document, event: Event) -> bool:
    """Whether a piece of work sends its result to another rank."""
    pp, vpp = document.parallelism.pp, document.parallelism.vpp
    schedule = Schedule(document.parallelism.schedule)
    stage = stage_of(schedule, event.rank, event.chunk, pp)
    if event.kind is Kind.W:
        return False
    other = stage + 1 if event.kind is Kind.F else stage - 1
    return 0 <= other < pp * vpp and rank_of(schedule, other, pp) != event.rank
