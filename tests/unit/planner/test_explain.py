"""The explanation says what binds, what eats the time and why others lost."""

from __future__ import annotations

from planner.explain import explain, losses, render
from planner.plan import Plan
from tests.unit.planner.plan_samples import edited, sample


def _text(plan: Plan) -> str:
    return render(explain(plan))


def test_it_fits_a_terminal_and_names_the_alternatives() -> None:
    text = _text(sample())
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "FSDP: dp 16, zero 3" in text
    assert "(+20.0%); gathers parameters twice" in text
    assert "my::op" in text
    assert "Memory does not bind" in text
    assert "Stage 1 sets the pace: 31 ms" in text


def test_equal_calls_of_several_stages_are_one_line() -> None:
    lines = [x for x in _text(sample()).splitlines() if "all_reduce on tp" in x]
    assert len(lines) == 1


def test_memory_binds_when_little_is_left() -> None:
    plan = sample()
    total = plan.stages[0].memory.total_bytes
    for limit, words in ((total, "Memory binds"), (total - 2**30, "not suffice")):
        path = "estimate/memory_per_stage/0/limit_bytes"
        assert words in _text(edited(plan, path, limit))


def test_verdicts_on_mfu() -> None:
    for mfu, words in (
        (0.60, "better than most"),
        (0.45, ": good"),
        (0.35, ": fair"),
        (0.20, ": low"),
    ):
        text = " ".join(_text(edited(sample(), "estimate/mfu", mfu)).split())
        assert words in text
        assert ("What eats the rest, in order: compute below peak" in text) == (
            mfu < 0.40
        )


def test_losses_and_mfu_make_the_whole_step() -> None:
    plan = sample()
    found = losses(plan)
    assert abs(sum(share for _, share in found) + plan.estimate.mfu - 1) < 1e-9
    shares = [share for _, share in found]
    assert shares == sorted(shares, reverse=True)


def test_what_comes_closest_names_the_settings() -> None:
    text = " ".join(_text(sample()).split())
    assert (
        "Closest in time: tp 2 -> 1, pp 2 -> 1, dp shard 4 -> 16, zero 1 -> 3, "
        "micro batch size 2 -> 4;"
    ) in text


def test_low_utilisation_names_causes_with_their_cost() -> None:
    plan = edited(sample(), "estimate/mfu", 0.2)
    text = " ".join(_text(plan).split())
    order = [what for what, _ in losses(plan)]
    said = text.split("What eats the rest, in order: ")[1]
    places = [said.index(what) for what in order]
    assert places == sorted(places)
    assert "pipeline bubble" in said
    assert "(30 ms)" in said
