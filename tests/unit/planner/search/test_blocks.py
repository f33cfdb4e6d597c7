"""The block problem finds the optimum of what is priced; Megatron falls out of it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from passes.ir import OpGraph, OpKind
from planner.search.blocks import BlockProblem, BlockSolution, BoundaryState
from planner.search.job import Configuration, Job
from planner.search.mesh import Mesh
from planner.search.strategies import Strategy
from tests.small import MLP, gpt_graph, graph_of, job_of


def problem_of(
    job: Job, size: int, state: str, block: int = 0, rate: float = 1e-15
) -> BlockProblem:
    c = Configuration(Mesh(tp=size), 1, 1, state=state)
    job.solutions(c)  # fills the caches that a problem needs
    pricer, facts = job.pricer(1, 1)
    comm = job.comm(Mesh(tp=size))
    return BlockProblem(
        facts,
        job.collapsed.graph.blocks[block],
        pricer,
        lambda kind, nbytes: comm.seconds("tp", kind, nbytes),
        size,
        BoundaryState(state),
        seconds_per_byte=rate,
    )


def total(problem: BlockProblem, s: BlockSolution) -> float:
    """The objective, from the terms that a choice is reported with."""
    graph, rate = problem.graph, problem.rate
    value = s.forward_s + s.backward_s + s.comm_forward_s + s.comm_backward_s
    for i, strategy in zip(problem.indices, s.strategies, strict=True):
        nbytes = problem._sync_bytes(graph.ops[i], strategy)  # pyright: ignore[reportPrivateUsage]
        value += problem.comm("all_reduce", nbytes) if nbytes else 0.0
    value += rate * s.saved_bytes
    kept = {p.name: p.numel for p in s.parameters}
    for name, numel in kept.items():
        tensor = graph.tensor(name)
        value += rate * 8 * numel * tensor.nbytes / tensor.numel
    return value


@pytest.fixture(scope="module")
def mlp() -> OpGraph:
    with torch.device("meta"):
        return graph_of(MLP(256, 1024), torch.zeros(2, 64, 256))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("state", ["replicated", "sequence"])
def test_the_optimum_equals_brute_force(mlp: OpGraph, size: int, state: str) -> None:
    job = job_of(mlp, "8xA100")
    problem = problem_of(job, size, state)
    found = problem.solve()
    assert found is not None
    assert found.status == "optimal"
    assert total(problem, found) == pytest.approx(found.seconds, rel=1e-9)
    best = float("inf")
    indices = list(problem.indices)
    names = list(problem.shared)
    for choice in product(*(problem.strategies[i] for i in indices)):
        chosen: dict[int, Strategy] = dict(zip(indices, choice, strict=True))
        options = [problem.shared_choices(n) for n in names]
        for states in product(*options):
            shared = dict(zip(names, states, strict=True))
            if not problem.is_legal(chosen, shared):
                continue
            priced = problem.measure(chosen, shared, "", 0.0)
            best = min(best, total(problem, priced))
    assert found.seconds == pytest.approx(best, rel=1e-9)


def test_megatron_falls_out_of_the_iteration_spaces() -> None:
    """Column then row parallel, sequence-sharded norms, two gathers and scatters."""
    graph = gpt_graph(hidden=4096, heads=32, seq=2048, vocab=51200)
    job = job_of(graph, "8xA100")
    c = Configuration(Mesh(tp=8), 1, 1, state="sequence")
    solutions = job.solutions(c)
    assert solutions is not None
    layer = next(i for i, (b, n) in enumerate(job.chain) if n == 2)
    block, chosen = job.chain[layer][0], solutions[layer]
    by_name = {
        op.module.rsplit(".", 1)[-1]: s
        for op, s in zip(
            job.collapsed.graph.ops[block.start : block.stop],
            chosen.strategies,
            strict=True,
        )
        if op.kind is OpKind.GEMM
    }
    assert str(by_name["qkv"].inputs[1]) == "S(0;3x)"  # each of q, k, v
    assert str(by_name["proj"].inputs[1]) == "S(1)"
    assert str(by_name["up"].inputs[1]) == "S(0)"
    assert str(by_name["down"].inputs[1]) == "S(1)"
    kinds = sorted((comm.kind, comm.phase) for comm in chosen.comms)
    assert kinds == sorted(
        [("all_gather", "forward"), ("reduce_scatter", "forward")] * 2
        + [("all_gather", "backward"), ("reduce_scatter", "backward")] * 2
    )


def test_without_sequence_parallelism_there_are_two_all_reduces_each_way() -> None:
    graph = gpt_graph(hidden=4096, heads=32, seq=2048, vocab=51200)
    job = job_of(graph, "8xA100")
    c = Configuration(Mesh(tp=8), 1, 1, state="replicated", sequence_parallel=False)
    solutions = job.solutions(c)
    assert solutions is not None
    layer = next(i for i, (b, n) in enumerate(job.chain) if n == 2)
    kinds = sorted((m.kind, m.phase) for m in solutions[layer].comms)
    assert kinds == [("all_reduce", "backward")] * 2 + [("all_reduce", "forward")] * 2


def test_more_ranks_than_heads_keep_attention_whole() -> None:
    job = job_of(gpt_graph(hidden=4096, heads=8, seq=2048, vocab=51200), "16xA100")
    for size, whole in ((8, False), (16, True)):
        c = Configuration(Mesh(tp=size), 1, 1, sequence_parallel=False)
        solutions = job.solutions(c)
        assert solutions is not None
        layer = next(i for i, (b, n) in enumerate(job.chain) if n == 2)
        block = job.chain[layer][0]
        ops = job.collapsed.graph.ops[block.start : block.stop]
        for op, s in zip(ops, solutions[layer].strategies, strict=True):
            if op.kind is OpKind.ATTENTION:
                assert (s.dim != "h") == whole
