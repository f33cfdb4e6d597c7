"""The search equals solving every shape, recipes included, and says why it fails."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

import pytest

from planner.errors import InfeasibleError, PlannerError
from planner.search.driver import Limits, Search
from planner.search.recipes import recipes
from planner.search.stages import Counts
from tests.small import gpt_graph, job_of


@pytest.mark.parametrize("limit_gib", [79.0, 2.2, 1.6])
def test_the_best_of_every_mesh_of_eight_gpus(limit_gib: float) -> None:
    """A 2-layer model: best-first with bounds finds what solving all shapes finds."""
    job = job_of(gpt_graph(), "8xA100", memory_limit_bytes=limit_gib * 2**30)
    search = Search(job, 16)
    outcome = search.run()
    every = Search(job, 16)
    solved = [every.solve(c) for c in every.configurations()]
    times = [p.terms.total_s for p in solved if p is not None]
    assert len(times) > 50
    assert outcome.best.terms.total_s == pytest.approx(min(times), rel=1e-9)
    assert outcome.bound_s <= outcome.best.terms.total_s
    assert outcome.best.fits
    parts = outcome.pruned + outcome.solved + outcome.cut_off + outcome.infeasible
    assert parts == outcome.enumerated


def test_no_bound_exceeds_what_its_shape_reaches() -> None:
    job = job_of(gpt_graph(), "8xA100", memory_limit_bytes=2.2 * 2**30)
    search = Search(job, 16)
    checked = 0
    for c in search.configurations():
        priced = search.solve(c)
        if priced is None:
            continue
        checked += 1
        seconds = priced.terms.total_s * (1 + 1e-9)
        assert search.floor(c) <= seconds
        assert search.bound(c) <= seconds
        assert search.memory_bound(c) <= seconds
        assert not search.hopeless(c)
    assert checked > 50


def test_never_worse_than_the_recipes() -> None:
    job = job_of(gpt_graph(layers=8, hidden=2048, heads=16), "16xA100")
    search = Search(job, 64)
    best = search.run().best
    named = set()
    for name, c in recipes(job, 64):
        priced = search.solve(c)
        named.add(name)
        if priced is not None:
            assert best.terms.total_s <= priced.terms.total_s * (1 + 1e-9)
    assert named == {"DDP", "FSDP", "Megatron"}


def test_terms_add_up_and_pins_hold() -> None:
    job = job_of(gpt_graph(layers=8, hidden=2048, heads=16), "16xA100")
    pins = {"tp": 4, "pp": 2, "micro_batch_size": 2, "zero": 1, "recompute": "full"}
    best = Search(job, 64, Limits(pins)).run().best
    c, t = best.configuration, best.terms
    assert (c.mesh.tp, c.mesh.pp, c.micro_batch, c.zero) == (4, 2, 2, 1)
    parts = (
        t.compute, t.tp_comm, t.cp_comm, t.ep_comm, t.dp_comm_exposed, t.pp_p2p,
        t.pp_bubble, t.recompute, t.optimizer, t.launch,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(t.total_s, rel=1e-12)
    for counts in best.layout:
        for row, (_, count) in zip(counts, job.chain, strict=True):
            if count > 1:
                assert row[0] == row[1] == 0


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    job = job_of(gpt_graph(), "2xA100", memory_limit_bytes=0.8 * 2**30)
    with pytest.raises(InfeasibleError, match=r"bytes .* missing on stage") as found:
        Search(job, 4).run()
    assert "GPUs" in found.value.fix


def test_heads_that_do_not_divide_are_named() -> None:
    job = job_of(gpt_graph(hidden=768, heads=12), "8xA100")
    with pytest.raises(PlannerError, match="12 heads not divisible by 8"):
        Search(job, 8, Limits({"tp": 8})).run()


def test_the_certificate_holds_for_every_layout() -> None:
    """No layout of any shape, cut and recomputed in any way, beats the bound."""
    job = job_of(gpt_graph(), "4xA100", memory_limit_bytes=2.6 * 2**30)
    search = Search(job, 8, Limits({"pp": 2, "cp": 1}))
    outcome = search.run()
    best = inf
    layouts = list(_layouts([n for _, n in job.chain]))
    for c in search.configurations():
        if job.solutions(c) is None:
            continue
        least = inf
        for layout in layouts:
            priced = job.price(c, layout)
            if priced.fits:
                least = min(least, priced.terms.total_s)
        assert search.memory_bound(c) <= least * (1 + 1e-9)
        best = min(best, least)
    assert outcome.bound_s <= best * (1 + 1e-9)
    assert best < inf


def _layouts(counts: list[int]) -> Iterator[tuple[Counts, ...]]:
    """Every cut of a chain of runs over two ranks, every mode of every block."""
    total = sum(counts)
    for cut in range(1, total):
        sides: list[list[Counts]] = []
        for low, high in ((0, cut), (cut, total)):
            held, start = [], 0
            for n in counts:
                held.append(max(0, min(high, start + n) - max(low, start)))
                start += n
            choices = [
                [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
                for n in held
            ]
            sides.append([tuple(rows) for rows in product(*choices)])
        yield from product(*sides)
