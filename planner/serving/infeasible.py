"""Says why nothing serves: which limit, by how much, and what would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.errors import InfeasibleError
from planner.serving.kv_cache import Formats, illegal_tp, weight_bytes
from planner.serving.phases import Layout

if TYPE_CHECKING:
    from planner.serving.search import Point, Server

SMALLER = {"bf16": "fp8", "fp16": "int8", "fp32": "bf16", "fp8": "int4", "int8": "int4"}


def explain(
    server: Server, layouts: Sequence[Layout], points: Sequence[Point]
) -> InfeasibleError:
    """The error for a workload that no point meets."""
    fitting = [p for p in points if p.fits]
    if not fitting:
        return _too_big(server, layouts)
    w = server.workload
    if w.ttft_limit_s is not None:
        best = min(fitting, key=lambda p: p.ttft_s)
        if best.ttft_s > w.ttft_limit_s:
            return _too_slow(server, "time to first token", best.ttft_s, w.ttft_limit_s)
    if w.tpot_limit_s is not None:
        best = min(fitting, key=lambda p: p.tpot_s)
        if best.tpot_s > w.tpot_limit_s:
            return _too_slow(
                server, "time per output token", best.tpot_s, w.tpot_limit_s
            )
    kept = [p for p in fitting if _within(server, p)] or fitting
    most = max(kept, key=lambda p: p.tokens_per_s)
    if w.arrival_per_s is not None:
        rate = most.tokens_per_s / w.output_len
        needed = w.arrival_per_s / max(rate, 1e-12)
        gpus = server.cluster.num_gpus
        return InfeasibleError(
            "the arrival rate is above what the cluster serves within the limits",
            f"{w.arrival_per_s:g} requests/s arrive, at most {rate:.3g} are served",
            f"about {int(gpus * needed) + 1} of these GPUs would do",
            status="limit_unreachable",
        )
    return InfeasibleError(
        "no layout meets both latency limits at once",
        f"ttft {w.ttft_limit_s} s and tpot {w.tpot_limit_s} s",
        "relax one of them",
        status="limit_unreachable",
    )


def _within(server: Server, point: Point) -> bool:
    w = server.workload
    late = w.ttft_limit_s is not None and point.ttft_s > w.ttft_limit_s
    slow = w.tpot_limit_s is not None and point.tpot_s > w.tpot_limit_s
    return not (late or slow)


def _too_slow(server: Server, what: str, best: float, limit: float) -> InfeasibleError:
    smaller = SMALLER.get(server.workload.weights)
    fix = f"relax the limit to {best * 1e3:.3g} ms"
    if smaller:
        fix += f", try {smaller} weights, or GPUs with more bandwidth"
    return InfeasibleError(
        f"the {what} limit can not be met",
        f"{limit * 1e3:.4g} ms asked, {best * 1e3:.4g} ms is the least at any batch "
        f"({(best / limit - 1):.0%} over)",
        fix,
        status="limit_unreachable",
    )


def _too_big(server: Server, layouts: Sequence[Layout]) -> InfeasibleError:
    """Needed and available bytes of the layout that misses least, and what fits."""

    def missing(layout: Layout) -> float:
        wanted = max(1, server.workload.batch or 1)
        return max(
            n.fixed + wanted * n.sequence - n.limit for n in server.needs(layout)
        )

    best = min(layouts, key=lambda x: (missing(x), x.gpus))
    need = max(server.needs(best), key=lambda n: n.fixed + n.sequence - n.limit)
    wanted = max(1, server.workload.batch or 1)
    total = need.fixed + wanted * need.sequence
    usable = need.limit - (need.fixed - need.weights)
    weights = weight_bytes(server.model, server.pricer.formats)
    least = int(-(-weights // max(usable, 1)))
    hints = [f"at least {least} of these GPUs for the weights alone"]
    smaller = SMALLER.get(server.workload.weights)
    formats = server.pricer.formats
    enough = _first_that_fits(server, wanted)
    if enough:
        hints.append(f"tp={enough.tp} on {enough.gpus} of them fits")
    if smaller:
        other = Formats(smaller, formats.kv, formats.group)
        size = weight_bytes(server.model, other)
        hints.append(f"{smaller} weights take {size / 2**30:.1f} GiB")
    return InfeasibleError(
        "the model does not fit",
        f"tp={best.tp} pp={best.pp} needs {total / 2**30:.1f} GiB a GPU of "
        f"{need.limit / 2**30:.1f} GiB, {(total - need.limit) / 2**30:.1f} GiB too "
        f"much (weights {need.weights / 2**30:.1f}, cache of {wanted} sequences "
        f"{wanted * need.sequence / 2**30:.1f}, workspace "
        f"{need.workspace / 2**30:.1f}, graphs {need.graphs / 2**30:.1f}, reserve "
        f"{need.reserve / 2**30:.1f})",
        "; ".join(hints),
    )


def _first_that_fits(server: Server, wanted: int) -> Layout | None:
    """The least power of two of tensor ranks that would hold the model and cache."""
    for tp in (1, 2, 4, 8, 16, 32, 64):
        if illegal_tp(server.model, tp, server.pricer.formats):
            continue
        layout = Layout(tp)
        if min(n.sequences for n in server.needs(layout)) >= wanted:
            return layout
    return None
