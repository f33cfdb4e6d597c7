"""Page data, timeline and diff: they add up and agree with the plan."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from planner.diff import diff, render
from planner.plan import Plan
from planner.report.data import page_data
from planner.report.html import page
from planner.report.perfetto import step_of, trace_events, trace_json
from planner.workload import Parallelism
from tests.unit.planner.export.plans import plan_of
from tests.unit.planner.plan_samples import edited, sample


def test_the_waterfall_adds_up_to_the_step() -> None:
    plan = sample()
    rows = page_data(plan, reprice=False)["waterfall"]
    total = sum(r["seconds"] for r in rows)
    assert total == pytest.approx(plan.estimate.step_time_s, rel=1e-12)
    assert rows[0]["seconds"] == pytest.approx(0.45 * plan.estimate.step_time_s)
    assert all(r["source"] for r in rows)


def test_memory_bars_are_the_lines_of_the_plan() -> None:
    plan = sample()
    memory = page_data(plan, reprice=False)["memory"]
    assert [sum(s) for s in memory["stages"]] == [
        s.memory.total_bytes for s in plan.stages
    ]


def test_the_page_is_alone() -> None:
    text = page(sample(), reprice=False)
    outside = re.findall(r'(?:src|href)\s*=|url\(|@import|https?://[^"\s]+', text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert "<title>sample on 16xA100</title>" in text
    assert text == page(sample(), reprice=False)


def test_a_plan_without_a_named_model_says_why_there_is_no_roofline() -> None:
    data = page_data(sample(), reprice=True)
    assert data["roofline"] is None
    assert any("no roofline" in n for n in data["notes"])


def test_block_graph_follows_the_data() -> None:
    blocks = page_data(sample(), reprice=False)["blocks"]
    ops = blocks[0]["ops"]
    for number, op in enumerate(ops):
        assert all(source < number for source in op["from"])
    names = [op["name"] for op in ops]
    assert sorted(names) == names or len(names) == 3


@pytest.mark.parametrize(
    "shape",
    [
        Parallelism(pp=4, dp_replicate=2),
        Parallelism(pp=4, vpp=2, dp_replicate=2),
        Parallelism(pp=4, dp_replicate=2, schedule="gpipe"),
        Parallelism(pp=4, vpp=2, dp_replicate=2, schedule="zero_bubble"),
        Parallelism(dp_replicate=8),
    ],
)
def test_the_trace_holds_every_piece_once(shape: Parallelism) -> None:
    plan = plan_of(shape, 64)
    events = trace_events(plan)
    works = [e for e in events if e["ph"] == "X" and e.get("tid") == 0]
    count = plan.parallelism.num_micro_batches
    assert count is not None
    kinds = 3 if shape.schedule == "zero_bubble" else 2
    pieces = [e for e in works if "micro_batch" in e.get("args", {})]
    assert len(pieces) == kinds * count * shape.pp * shape.vpp
    end = max(e["ts"] + e["dur"] for e in works)
    assert end == pytest.approx(step_of(plan).total_s * 1e6)
    for rank in range(shape.pp):
        line = sorted((e["ts"], e["dur"]) for e in works if e["pid"] == rank)
        for (start, length), (after, _) in pairwise(line):
            assert start + length <= after + 1e-6
    for e in events:
        if e.get("cat") == "message":
            assert shape.pp > 1


def test_the_trace_is_that_of_the_price() -> None:
    """Balanced stages under 1F1B without messages: the closed form is exact."""
    plan = plan_of(Parallelism(pp=4, dp_replicate=2), 64)
    stages = tuple(
        s.model_copy(update={"forward_s": 0.01, "backward_s": 0.02, "send_s": 0.0})
        for s in plan.stages
    )
    even = plan.model_copy(update={"stages": stages})
    assert step_of(even).timeline.total_s == pytest.approx((32 + 3) * 0.03)


def test_trace_file() -> None:
    data = json.loads(trace_json(sample()))
    assert {e["ph"] for e in data["traceEvents"]} == {"M", "X"}
    names = {
        e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {"stage 0 (ranks 0-7)", "stage 1 (ranks 8-15)"}
    assert data["otherData"]["step_time_s"] == sample().estimate.step_time_s


def test_diff_of_a_plan_with_itself() -> None:
    assert diff(sample(), sample()) == ()
    assert "no difference" in render((), "a.json", "b.json")


def test_diff_names_the_terms() -> None:
    a = sample()
    b: Plan = edited(a, "parallelism/zero", 3)
    b = edited(b, "estimate/breakdown/tp_comm", 0.5)
    b = edited(b, "estimate/step_time_s", a.estimate.step_time_s + 0.48)
    b = edited(b, "estimate/memory_per_stage/0/parameters_bytes", 0)
    b = edited(b, "estimate/memory_per_stage/1/parameters_bytes", 2**33)
    b = edited(b, "estimate/memory_per_stage/1/total_bytes", 2**34)
    text = render(diff(a, b), "a.json", "b.json")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert re.search(r"zero +1 +3", text)
    assert re.search(r"tensor-parallel comm +20 ms +500 ms +\+480 ms", text)
    assert re.search(r"parameters +.* GiB +8.0 GiB +\+", text)


def test_diff_of_two_clusters() -> None:
    a, b = plan_of(Parallelism(dp_shard=8, zero=3), 64), sample()
    text = render(diff(a, b), "a.json", "b.json")
    assert re.search(r"GPUs +8 +16", text)
    assert re.search(r"model +llama3-8b +sample", text)
