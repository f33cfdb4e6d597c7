"""One test per part of the intra-op solver: reductions, bounds, searches, formats."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sharding
from planner.errors import PlannerError
from planner.search.intra.bounds import Messages
from planner.search.intra.clock import Clock
from planner.search.intra.core import Core, components, core_of, restrict
from planner.search.intra.cp_sat import CpModel
from planner.search.intra.descent import Descent
from planner.search.intra.elimination import decode, eliminate, make_plan
from planner.search.intra.exact import enumerate_below, lagrange
from planner.search.intra.pricing import Pricer
from planner.search.intra.problem import Problem
from planner.search.intra.reductions import Graph, reduce
from planner.search.intra.usage import Infeasible, compress
from planner.search.intra_op import evaluate, solve

INF = np.inf


def random_problem(
    seed: int,
    n: int = 7,
    sizes: tuple[int, int] = (2, 4),
    forbid: float = 0.15,
    tight: float | None = 0.4,
) -> Problem:
    """A connected problem that no reduction solves alone."""
    rng = np.random.default_rng(seed)
    count = rng.integers(sizes[0], sizes[1] + 1, n)
    costs = [rng.integers(0, 50, k).astype(float) for k in count]
    usages = [rng.integers(1, 30, k).astype(float) for k in count]
    begin = rng.integers(0, n, n)
    intervals = np.stack([begin, begin + rng.integers(1, n, n)], axis=1)
    edges = []
    for i, j in itertools.combinations(range(n), 2):
        if rng.random() < 0.5:
            m = rng.integers(0, 60, (count[i], count[j])).astype(float)
            m[rng.random(m.shape) < forbid] = INF
            edges.append((i, j, m))
    limit = None
    if tight is not None:
        low, high = peaks(usages, intervals)
        limit = float(np.floor(low + tight * (high - low)))
    return Problem.make(costs, usages, intervals, edges, limit)


def peaks(usages: list[np.ndarray], intervals: np.ndarray) -> tuple[float, float]:
    """The highest use at the least and at the average of every node."""
    low, high = [], []
    for t in range(int(intervals.max())):
        live = [u for u, (s, e) in zip(usages, intervals, strict=True) if s <= t < e]
        low.append(sum(u.min() for u in live))
        high.append(sum(u.mean() for u in live))
    return float(max(low)), float(max(high))


def brute_force(problem: Problem) -> float:
    every = itertools.product(*(range(c.size) for c in problem.costs))
    found = (evaluate(problem, np.array(x)) for x in every)
    return min((f.cost for f in found if f.valid), default=INF)


def core_from(problem: Problem) -> Core:
    """A core with nothing reduced but the rows."""
    graph = Graph(problem)
    graph.set_usage()
    return core_of(graph)[0]


# -- evaluation ----------------------------------------------------------------


def test_evaluation_counts_half_open_intervals() -> None:
    problem = Problem.make([[1], [2]], [[5], [6]], [[0, 2], [2, 3]], [], 6)
    found = evaluate(problem, np.zeros(2, dtype=np.int64))
    assert (found.cost, found.peak_usage, found.valid) == (3.0, 6.0, True)
    tight = Problem.make([[1], [2]], [[5], [6]], [[0, 3], [2, 3]], [], 10)
    assert not evaluate(tight, np.zeros(2, dtype=np.int64)).valid


def test_evaluation_refuses_forbidden_pairs_and_ignores_empty_intervals() -> None:
    edge = (0, 1, [[INF, 1.0]])
    problem = Problem.make([[1], [2, 3]], [[5], [6, 99]], [[0, 2], [1, 1]], [edge], 5)
    assert not evaluate(problem, np.array([0, 0])).valid
    found = evaluate(problem, np.array([0, 1]))
    assert (found.cost, found.valid) == (5.0, True)
    with pytest.raises(ValueError, match="strategy 2"):
        evaluate(problem, np.array([0, 2]))
    with pytest.raises(ValueError, match="one strategy per node"):
        evaluate(problem, np.array([0]))


# -- reductions, one by one ----------------------------------------------------


def alive(graph: Graph) -> list[int]:
    return [i for i, a in enumerate(graph.alive) if a]


def test_a_strategy_without_a_finite_partner_is_dropped() -> None:
    m = [[1.0, 7.0], [INF, INF], [3.0, 2.0]]
    graph = Graph(Problem.make([[5, 0, 5], [1, 2]], edges=[(0, 1, m)]))
    graph.propagate()
    assert [graph.cost[i].size for i in alive(graph)] == [2, 2]
    assert graph.log[0][:2] == ("keep", 0)


def test_a_follower_is_folded_with_its_costs_edges_and_use() -> None:
    same = [[0.0, INF], [INF, 4.0]]
    other = [[1.0, 2.0], [3.0, 9.0]]
    problem = Problem.make(
        [[5, 6], [10, 20], [0, 1]],
        [[1, 2], [3, 8], [0, 0]],
        [[0, 2], [1, 3], [0, 3]],
        [(0, 1, same), (1, 2, other)],
        9.0,
    )
    graph = Graph(problem)
    graph.propagate()
    graph.set_usage()
    assert len(alive(graph)) == 2
    owner = next(i for i in alive(graph) if i != 2)
    assert graph.cost[owner].tolist() == [15.0, 30.0]
    assert graph.adj[owner][2].tolist() == other
    assert graph.rows.capacity.tolist() == [5.0]  # 9 - (1 + 3) where both live
    assert graph.use[owner][(0, 1)].tolist() == [0.0, 6.0]
    assert graph.lift({owner: 1, 2: 0}).tolist() == [1, 1, 0]


def test_parallel_edges_are_summed_and_splittable_edges_vanish() -> None:
    one, two = np.array([[0.0, 1.0], [5.0, 0.0]]), np.array([[0.0, 9.0], [5.0, 20.0]])
    graph = Graph(Problem.make([[0, 0], [0, 0]], edges=[(0, 1, one), (1, 0, two.T)]))
    assert graph.adj[0][1].tolist() == (one + two).tolist()
    graph.propagate()  # one + two = [0, 10] per row plus [0, 10] per column
    assert alive(graph) == [0, 1]
    assert not graph.adj[0]
    assert not graph.adj[1]
    assert graph.cost[0].tolist() == [0.0, 10.0]
    assert graph.cost[1].tolist() == [0.0, 10.0]


def test_single_strategies_become_constants() -> None:
    graph = Graph(Problem.make([[7], [1, 2]], edges=[(0, 1, [[3.0, 4.0]])]))
    graph.propagate()
    assert alive(graph) == [1]
    assert graph.constant == 7.0
    assert graph.cost[1].tolist() == [4.0, 6.0]


@pytest.mark.parametrize(("usage", "left"), [(4.0, 1), (6.0, 2)])
def test_dominance_respects_use(usage: float, left: int) -> None:
    m = np.array([[1.0, 2.0], [1.0, 3.0]])
    problem = Problem.make(
        [[1, 2], [0, 0]],
        [[usage, 5.0], [0.0, 10.0]],
        [[0, 1], [0, 1]],
        [(0, 1, m)],
        12.0,
    )
    graph = Graph(problem)
    graph.set_usage()
    graph.dominate()
    assert graph.cost[0].size == left


def test_a_strategy_that_overflows_a_row_is_dropped() -> None:
    problem = Problem.make(
        [[1, 0], [5, 0]], [[1, 9], [2, 3]], [[0, 2], [1, 3]], [], 10.0
    )
    graph = Graph(problem)
    graph.set_usage()
    graph.tighten()
    assert graph.cost[0].size == 1
    assert graph.cost[1].size == 2


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_a_free_node_of_low_degree_is_minimised_out(degree: int) -> None:
    rng = np.random.default_rng(degree)
    costs = [rng.integers(0, 9, 3).astype(float) for _ in range(3)]
    edges = [(0, 1 + k, rng.integers(0, 9, (3, 3)) * 1.0) for k in range(degree)]
    problem = Problem.make(costs, edges=edges)
    graph = Graph(problem)
    graph.drop(0)
    assert not graph.alive[0]
    assert not graph.adj[0]
    best = INF
    for one, two in itertools.product(range(3), repeat=2):
        full = graph.lift({1: one, 2: two})
        value = graph.constant + graph.cost[1][one] + graph.cost[2][two]
        value += graph.adj[1][2][one, two] if degree == 2 else 0.0
        assert value == evaluate(problem, full).cost
        best = min(best, value)
    assert best == brute_force(problem)


@pytest.mark.parametrize("seed", range(30))
def test_reductions_keep_the_optimum(seed: int) -> None:
    problem = random_problem(seed, n=6)
    best = brute_force(problem)
    try:
        graph = reduce(problem)
    except Infeasible:
        assert best == INF
        return
    core, live = core_of(graph)
    found = INF
    for picks in itertools.product(*(range(c.size) for c in core.cost)):
        x = np.array(picks, dtype=np.int64)
        price = core.price(x) + graph.constant
        if core.fits(x) and price < INF:
            full = graph.lift(dict(zip(live.tolist(), picks, strict=True)))
            assert evaluate(problem, full).valid
            assert evaluate(problem, full).cost == price
            found = min(found, price)
    assert found == best


def test_rows_that_cannot_bind_are_dropped() -> None:
    use = {0: {(0, 4): np.array([1.0, 3.0])}, 1: {(1, 2): np.array([0.0, 2.0])}}
    items, rows = compress(use, np.array([9.0, 4.0, 2.0, 2.0]))
    # row 0 never binds; rows 2 and 3 are alike; row 1 has two live nodes
    assert rows.capacity.tolist() == [3.0, 1.0]
    assert {n: list(i) for n, i in items.items()} == {0: [(0, 2)], 1: [(0, 1)]}
    with pytest.raises(Infeasible):
        compress(use, np.array([0.5, 4.0, 4.0, 4.0]))


# -- cores ---------------------------------------------------------------------


def test_components_and_restriction() -> None:
    m = np.array([[0.0, 5.0], [7.0, 1.0]])
    problem = Problem.make(
        [[0, 1], [0, 2], [3, 4]],
        [[1, 2], [1, 3], [1, 9]],
        [[0, 2], [0, 2], [0, 2]],
        [(0, 1, m)],
        12.0,
    )
    core = core_from(problem)
    assert [c.tolist() for c in components(core)] == [[0, 1], [2]]
    held = np.array([1, 0, 0])
    part = restrict(core, held, np.array([1]), [np.arange(2)])
    assert part.cost[0].tolist() == [7.0, 3.0]
    assert part.capacity.size == 0  # 12 - 2 - 1 leaves 9: nothing can overflow
    held[2] = 1
    part = restrict(core, held, np.array([1]), [np.arange(2)])
    assert part.capacity.tolist() == [0.0]  # 12 - 2 - 9 = 1, the least of node 1


# -- bounds and searches -------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_elimination_is_exact_without_a_limit(seed: int) -> None:
    problem = random_problem(seed, tight=None)
    core = core_from(problem)
    plan = make_plan(core, 1e6)
    assert not plan.held
    tables = eliminate(core, plan, core.cost)
    x = np.zeros(core.count, dtype=np.int64)
    decode(plan, tables, x)
    assert tables.value == brute_force(problem)
    if tables.value < INF:
        assert core.price(x) == tables.value


@pytest.mark.parametrize("seed", range(30))
def test_bounds_are_never_above_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    best = brute_force(problem)
    try:
        graph = reduce(problem)
    except Infeasible:
        assert best == INF
        return
    core, _ = core_of(graph)
    rng = np.random.default_rng(seed)
    messages, pricer = Messages(core), Pricer(core)
    for _ in range(6):
        prices = rng.random(core.capacity.size) * 3 * rng.integers(0, 2)
        theta = pricer.theta(prices)
        for _ in range(3):
            level = messages.sweep(theta) - prices @ core.capacity + graph.constant
            assert level <= best + 1e-9 * abs(best)
    state = lagrange(core, make_plan(core, 1e6))
    assert state.bound + graph.constant <= best + 1e-9 * abs(best)


def test_messages_are_exact_on_a_tree() -> None:
    rng = np.random.default_rng(3)
    costs = [rng.random(4) for _ in range(9)]
    edges = [(int(rng.integers(0, k)), k, rng.random((4, 4))) for k in range(1, 9)]
    core = core_from(Problem.make(costs, edges=edges))
    plan = make_plan(core, 1e6)
    exact = eliminate(core, plan, core.cost).value
    messages = Messages(core)
    for _ in range(200):
        level = messages.sweep(core.cost)
    assert level == pytest.approx(exact, rel=1e-9)
    assert core.price(messages.decode(core.cost)) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_enumeration_proves_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    best = brute_force(problem)
    try:
        graph = reduce(problem)
        core, _ = core_of(graph)
        plan = make_plan(core, 1e6)
        state = enumerate_below(core, plan, lagrange(core, plan), most=10**6)
    except Infeasible:
        assert best == INF
        return
    assert state.closed
    assert state.cost + graph.constant == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_cp_sat_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    best = brute_force(problem)
    try:
        core = core_from(problem)
    except Infeasible:
        assert best == INF
        return
    model = CpModel(core)
    while True:
        answer = model.solve(30.0, deterministic=True)
        assert answer.closed
        if answer.choice is None:
            assert best == INF
            return
        assert answer.bound <= best
        if not model.add_violated(answer.choice):
            break
    assert core.price(answer.choice) == best == answer.bound


def test_cp_sat_rounds_fractions_down() -> None:
    rng = np.random.default_rng(0)
    costs = [rng.random(3) * 1e-3 for _ in range(5)]
    edges = [(k, k + 1, rng.random((3, 3)) * 1e-3) for k in range(4)]
    problem = Problem.make(costs, edges=edges)
    answer = CpModel(core_from(problem)).solve(30.0, deterministic=True)
    best = brute_force(problem)
    assert answer.choice is not None
    assert answer.bound <= best
    assert answer.bound == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_descent_fits_and_brackets_the_optimum(seed: int) -> None:
    problem = random_problem(seed, n=8, forbid=0.05)
    best = brute_force(problem)
    try:
        graph = reduce(problem)
    except Infeasible:
        assert best == INF
        return
    core, live = core_of(graph)
    if not core.count:
        assert graph.constant == best
        return
    descent = Descent(core, Clock(60.0, True), seed)
    descent.learn(0.0, most=60)
    if descent.best is None:
        descent.repair(0.0, most=200)
    assert descent.best is not None
    descent.roam(0.0, most=40)
    descent.polish(0.0, most=40)
    full = graph.lift(dict(zip(live.tolist(), descent.best.tolist(), strict=True)))
    found = evaluate(problem, full)
    assert found.valid
    assert found.cost == descent.best_cost + graph.constant
    assert descent.bound + graph.constant <= best * (1 + 1e-9) <= found.cost + 1e-6


def test_moves_hold_what_does_not_fit_the_table() -> None:
    problem = random_problem(1, n=14, sizes=(4, 4), tight=None, forbid=0.0)
    core = core_from(problem)
    plan = make_plan(core, 300.0)
    assert plan.held
    assert plan.largest <= 300.0
    assert sorted([*plan.order, *plan.held]) == list(range(core.count))
    descent = Descent(core, Clock(60.0, True), 0)
    x = descent.last
    for _ in range(10):
        y = descent.move(plan, descent.pricer.theta(descent.prices), x)
        assert core.price(y) <= core.price(x)
        assert y[list(plan.held)].tolist() == x[list(plan.held)].tolist()
        x = y


# -- the interface -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_every_path_agrees(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CP-SAT and the moves, which small problems do not reach, equal brute force."""
    problem = random_problem(seed)
    best = brute_force(problem)
    monkeypatch.setattr("planner.search.intra_op._TABLE_LIMIT", 1.0)
    found = solve(problem, 30.0)
    if best == INF:
        assert found.status == "infeasible"
    else:
        assert (found.cost, found.status) == (best, "optimal")


def test_moves_alone_stay_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.search.intra_op._TABLE_LIMIT", 1.0)
    monkeypatch.setattr("planner.search.intra_op._MARGINALS_LIMIT", 0)
    problem = random_problem(5, n=9)
    best = brute_force(problem)
    found = solve(problem, 0.5)
    assert found.choice is not None
    assert evaluate(problem, found.choice).valid
    assert found.lower_bound <= best * (1 + 1e-9)
    assert best <= found.cost
    assert "descent" in found.stats["stages"]


def test_equal_inputs_equal_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(11, n=12, sizes=(4, 6), tight=0.3, forbid=0.05)
    monkeypatch.setattr("planner.search.intra_op._TABLE_LIMIT", 1.0)
    first = solve(problem, 1.0)
    assert first.choice is not None
    for _ in range(2):
        again = solve(problem, 1.0)
        assert again.choice is not None
        assert again.choice.tolist() == first.choice.tolist()
        assert (again.cost, again.lower_bound) == (first.cost, first.lower_bound)


def test_infeasible_limit_is_proved() -> None:
    problem = Problem.make([[1, 2], [1]], [[5, 6], [5]], [[0, 2], [1, 2]], [], 9.0)
    found = solve(problem)
    assert (found.status, found.choice) == ("infeasible", None)
    assert found.lower_bound == INF


def test_no_nodes_is_solved() -> None:
    found = solve(Problem.make([]))
    assert (found.status, found.cost) == ("optimal", 0.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"costs": [[1.0], []]}, "node 1"),
        ({"costs": [[1.0, np.nan]]}, "not a number"),
        ({"costs": [[1.0]], "usages": [[1.0, 2.0]]}, "as many usages"),
        ({"costs": [[1.0]], "edges": [(0, 1, [[1.0]])]}, "does not exist"),
        ({"costs": [[1.0], [1.0]], "edges": [(0, 1, [[1.0, 2.0]])]}, "wrong shape"),
        ({"costs": [[1.0]], "usages": [], "intervals": []}, "different numbers"),
        ({"costs": [[1.0]], "usage_limit": np.nan}, "usage_limit"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(PlannerError, match=text):
        Problem.make(**arguments)  # type: ignore[arg-type]


# -- the public format ---------------------------------------------------------


def test_the_formats_example(capsys: pytest.CaptureFixture[str]) -> None:
    path = sharding.DATA / "example.json.gz"
    document = sharding.read(path)
    every = itertools.product(*(range(c.size) for c in document.costs))
    checked = [sharding.check(document, x) for x in every]
    best = min(cost for cost, valid in checked if valid)
    assert min(cost for cost, _ in checked) < best  # the limit binds
    assert sharding.main([str(path), "--time-limit", "10"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cost"] == best
    assert (shown["status"], shown["valid"], shown["gap"]) == ("optimal", True, 0.0)


def test_a_contest_problem_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    path = sharding.DATA / "asplos-2025-iopddl-G.json.gz"
    assert sharding.main(["--data", str(path), "--time-limit", "60"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["cost"], shown["status"]) == (217039, "optimal")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not a sharding problem"),
        (b"[]", "not a sharding problem"),
        (b'{"problem": {}}', "no field"),
        (gzip.compress(b"{}")[:-9], "not a sharding problem"),
    ],
)
def test_bad_files_exit_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, text: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert sharding.main([str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert text in shown.err
    assert shown.err.count("\n") == 1


def test_bad_shapes_and_arguments_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {
        "name": "x",
        "nodes": {"intervals": [[0, 1]], "costs": [[1, 2]], "usages": [[1]]},
        "edges": {"nodes": [], "costs": []},
        "usage_limit": 3,
    }
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"problem": body}))
    assert sharding.main([str(path)]) == 2
    assert sharding.main([str(tmp_path / "none.json")]) == 2
    assert sharding.main([]) == 2
    assert sharding.main([str(path), "--time-limit", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 4


def test_no_choice_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {
        "name": "full",
        "nodes": {"intervals": [[0, 1]], "costs": [[1]], "usages": [[4]]},
        "edges": {"nodes": [], "costs": []},
        "usage_limit": 3,
    }
    path = tmp_path / "full.json"
    path.write_text(json.dumps({"problem": body}))
    assert sharding.main([str(path)]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert (shown["status"], shown["valid"], shown["cost"]) == (
        "infeasible",
        False,
        None,
    )
