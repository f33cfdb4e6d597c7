"""Every rule of the checker finds the edit that breaks it, and no other."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from planner.plan import Plan
from planner.search.check import check, differences
from tests.unit.planner.plan_samples import edited, sample


def test_the_sample_is_sound() -> None:
    assert check(sample()) == []
    assert check(sample(layers=1)) == []
    assert sample().check() == []


#: Path in the JSON, its new value, the rule that finds it, words of the message.
EDITS: list[tuple[str, object, str, str]] = [
    ("mesh/axes/4/size", 4, "mesh", "the cluster has 16 GPUs"),
    ("cluster/num_gpus", 8, "mesh", "the cluster has 8 GPUs"),
    ("cluster/groups/0/nodes", 3, "mesh", "its nodes have 24 GPUs"),
    # an overlapping stage: a block on two stages, or a rank in two
    ("stages/1/blocks/0", "layers.1", "stages", "not placed: ['layers.2']"),
    ("stages/1/ranks/0", 7, "stages", "in several stages: [7]"),
    ("stages/0/index", 1, "stages", "stages 0 to 1"),
    ("stages/0/chunks", [2], "stages", "do not split"),
    ("stages/0/ops", 1, "stages", "ops differ"),
    ("model/blocks/0/parameters", 1, "model", "hold"),
    ("recompute/layers.9", "full", "model", "no block 'layers.9'"),
    ("parallelism/num_micro_batches", 4, "batch", "= 32, the global batch is 64"),
    ("parallelism/micro_batch_size", 1, "batch", "= 32, the global batch is 64"),
    # a lowered memory line
    ("stages/0/memory/activations_bytes", 10**8, "memory", "add up to"),
    ("stages/0/memory/limit_bytes", 10**9, "memory", "over the limit"),
    ("stages/0/memory/limit_bytes", 10**12, "memory", "above the 80000000000 bytes"),
    ("estimate/memory_per_stage/0/limit_bytes", 7 * 10**10, "memory", "differs"),
    ("stages/0/forward_s", 0.02, "step", "step_time_s is"),
    ("stages/0/send_s", 0.1, "step", "step_time_s is"),
    ("estimate/after_pipeline_s", 0.001, "step", "optimizer is above"),
    ("estimate/breakdown/compute", 0.1, "step", "adds up to"),
    ("estimate/samples_per_s", 1000.0, "rates", "samples_per_s"),
    ("estimate/tokens_per_s_per_gpu", 1e9, "rates", "tokens_per_s_per_gpu"),
    ("estimate/mfu", 0.9, "rates", "mfu"),
    ("estimate/peak_flops_per_s", 1e14, "rates", "of the dense peak"),
    ("estimate/hardware_flops", 1.0, "rates", "below the model's FLOPs"),
    ("certificate/lower_bound_s", 10.0, "certificate", "above the objective"),
    ("certificate/gap", 0.0, "certificate", "gap"),
    ("certificate/status", "optimal", "certificate", "optimal with a gap"),
    ("certificate/objective_s", 0.1, "certificate", "not the plan's step time"),
    ("certificate/enumerated", 50, "certificate", "its parts make 5"),
    ("certificate/pins/tp", 8, "certificate", "8, not 2"),
    ("alternatives/0/step_time_s", 0.1, "certificate", "fits and is faster"),
    ("collectives/0/group_size", 4, "collectives", "no group of 4 on axis tp"),
    ("collectives/0/axis", "cp", "collectives", "no group of 2 on axis cp"),
    ("collectives/0/stage", 2, "collectives", "no stage 2"),
    ("collectives/0/count_per_step", 3, "collectives", "for 8 micro-batches"),
    ("collectives/0/bytes", 0, "collectives", "moves no bytes"),
    ("collectives", [], "collectives", "no stage sends"),
    ("collectives", [], "collectives", "no gradient is summed"),
    ("collectives", [], "collectives", "all calls together 0 s"),
    ("collectives", [], "placements", "no all_reduce on tp"),
    # a swapped placement: of the stored tensor, of the op, of both
    (
        "placements/layers.*.up.weight/outputs/0/placement/tp",
        "S(1)",
        "placements",
        "it lies as {'tp': 'S(1)'}",
    ),
    (
        "placements/layers.*.up/inputs/1/placement/tp",
        "S(1)",
        "placements",
        "R times weight S(1) is not S(2)",
    ),
    (
        "placements/layers.*.down/outputs/0/placement/tp",
        "R",
        "placements",
        "is not R",
    ),
    (
        "placements/layers.*.add/inputs/1/placement",
        {"tp": "P(sum)"},
        "",
        "",
    ),
    (
        "placements/layers.*.add/inputs/0/placement",
        {"tp": "S(9)"},
        "placements",
        "names dim 9",
    ),
    ("placements/embed.weight/outputs/0/placement", {"xp": "R"}, "placements", "xp"),
    ("placements/embed.weight/outputs/0/placement/tp", "S(0", "placements", "not a"),
    ("placements/embed.weight/outputs/0/placement/tp", "P(sum)", "placements", "sum"),
    ("placements/embed.weight/outputs/0/shape/0", 32001, "placements", "over 2 ranks"),
    ("placements/embed.weight/outputs/0/placement", {}, "memory", "tensors take"),
    ("placements/embed.weight/outputs/0/shape/0", 16, "memory", "place 66"),
    ("placements/embed.weight/dtype", "float32", "memory", "its tensors take"),
    ("placements/embed.weight/dtype", "float31", "memory", "unknown dtype"),
    ("placements/embed.weight/blocks", ["tail"], "memory", "no such blocks"),
    ("placements/layers.*.up/layers", "3-1", "placements", "ascending"),
    ("placements/embed.weight/layers", "0-3", "placements", "list of layers"),
]


@pytest.mark.parametrize(("path", "value", "rule", "words"), EDITS)
def test_an_edit_is_found(path: str, value: object, rule: str, words: str) -> None:
    found = check(edited(sample(), path, value))
    if not rule:
        assert found == []
        return
    assert any(v.rule == rule and words in str(v) for v in found), found


def test_lowering_a_line_and_its_total_everywhere_is_found() -> None:
    plan = sample()
    for where in ("stages/0/memory", "estimate/memory_per_stage/0"):
        plan = edited(plan, f"{where}/parameters_bytes", 10**6)
        total = sum(plan.stages[0].memory.lines().values())
        plan = edited(plan, f"{where}/total_bytes", total)
    assert [v.rule for v in check(plan)] == ["memory"]


def test_a_consistent_edit_is_found_by_pricing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Activations are not derivable from the document: only a new price tells."""
    honest, plan = sample(), sample()
    for where in ("stages/0/memory", "estimate/memory_per_stage/0"):
        plan = edited(plan, f"{where}/activations_bytes", 10**8)
    total = sum(plan.stages[0].memory.lines().values())
    for where in ("stages/0/memory", "estimate/memory_per_stage/0"):
        plan = edited(plan, f"{where}/total_bytes", total)
    assert check(plan) == []

    def reprice(_plan: Plan) -> Plan:
        return honest

    fake = SimpleNamespace(reprice=reprice)
    monkeypatch.setitem(sys.modules, "planner.api", fake)
    assert check(honest, recompute=True) == []
    found = check(plan, recompute=True)
    assert {v.rule for v in found} == {"reprice"}
    assert any("stages[0].memory.activations_bytes" in v.where for v in found)


def test_differences() -> None:
    a = {"x": [1.0, 2], "y": {"z": "s"}, "only": 1}
    b = {"x": [1.0 + 1e-13, 3], "y": {"z": "t"}}
    assert list(differences("", a, b)) == [
        (".only", 1, None),
        (".x[1]", 2, 3),
        (".y.z", "s", "t"),
    ]
    assert list(differences("", [1], [1, 2])) == [(" (length)", 1, 2)]
    assert list(differences("", 1.0, 1)) == []
