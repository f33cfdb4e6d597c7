"""Chooses how to serve: degrees, instances and batch, by trying every legal one.

The space is small (degrees divide heads and GPUs, batches are a grid refined to the
last one that meets the limits), so that it is enumerated: the answer is the best of all
its points, and the certificate says how many there were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.errors import InfeasibleError
from planner.search.mesh import divisors
from planner.serving.kv_cache import (
    Shard,
    cut,
    illegal_tp,
    shard_sequence_bytes,
    shard_weight_bytes,
)
from planner.serving.phases import Layout, Pricer, Step, closed_loop
from planner.workload import Inference, PinValue

#: Steps of the batch grid; the largest batch that fits and the largest that meets the
#: limits are added.
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
MOST_BATCH = 4096
#: Tokens of the largest prefill chunk that engines run at once.
CHUNK_TOKENS = 8192
#: Communicator buffers per GPU where several GPUs share a model.
COMM_BYTES = 0.5 * 2**30
#: Part of a GPU's memory that engines leave unused.
UNUSED = 0.04
#: Captured graphs hold buffers of every layer for each batch size.
LAYER_GRAPH_BYTES = 6 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of one GPU of one stage, without cache; ``sequence``: of one sequence."""

    weights: float
    workspace: float
    graphs: float
    reserve: float
    sequence: float
    limit: float

    @property
    def fixed(self) -> float:
        return self.weights + self.workspace + self.graphs + self.reserve

    @property
    def sequences(self) -> int:
        """Sequences of full length that fit beside the rest; may be negative."""
        room = self.limit - self.fixed
        if self.sequence <= 0:
            return MOST_BATCH if room >= 0 else -1
        return int(room // self.sequence) if room >= 0 else -1


@dataclass(frozen=True, slots=True)
class Point:
    """A layout with instances at a batch, priced."""

    layout: Layout
    instances: int
    batch: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    decode: Step
    prefill: Step
    fits: bool
    meets: bool
    prefill_instances: int = 0

    @property
    def gpus(self) -> int:
        return self.layout.gpus * self.instances


@dataclass(frozen=True, slots=True)
class Found:
    """The best point and everything that was looked at."""

    best: Point
    points: tuple[Point, ...]
    concurrency: int
    illegal: tuple[str, ...]
    binds: str
    enumerated: int
    infeasible: int


class Server:
    """Sizes and prices layouts of one model for one workload."""

    def __init__(self, pricer: Pricer, workload: Inference) -> None:
        self.pricer, self.workload = pricer, workload
        self.model, self.cluster = pricer.model, pricer.cluster
        self.length = workload.prompt_len + workload.output_len
        device = min(g.device.memory_bytes for g in self.cluster.groups)
        self.limit = min(device, workload.memory_limit_bytes or device)

    # ---- memory ------------------------------------------------------------------

    def needs(self, layout: Layout) -> tuple[MemoryNeed, ...]:
        """Of one GPU of each stage."""
        w, engine = self.workload, self.pricer.engine
        chunk = min(CHUNK_TOKENS, max(w.prompt_len, 2048))
        result: list[MemoryNeed] = []
        for k, layers in enumerate(cut(self.model, layout.pp)):
            shard = Shard(
                layers,
                layout.tp,
                layout.ep,
                layout.attention_dp,
                k == 0,
                k == layout.pp - 1,
            )
            weights = shard_weight_bytes(self.model, shard, self.pricer.formats)
            widest = max(
                p.n * p.chosen / (layout.tp if p.split == "column" else 1)
                for layer, _ in layers
                for p in layer.products
            )
            workspace = chunk * (2 * widest + 4 * self.model.hidden) * 2.0
            if k == layout.pp - 1:
                workspace += 256 * self.model.vocab / layout.tp * 4
            depth = sum(n for _, n in layers)
            graphs = 0.0
            if engine.graphs:
                graphs = engine.graph_bytes + depth * LAYER_GRAPH_BYTES
            reserve = engine.reserve_bytes + UNUSED * self.limit
            if layout.gpus > 1:
                reserve += COMM_BYTES
            sequence = shard_sequence_bytes(shard, self.length, w.kv)
            # with attention_dp each rank holds its own group's sequences
            result.append(
                MemoryNeed(
                    weights,
                    workspace,
                    graphs,
                    reserve,
                    sequence / layout.attention_dp,
                    float(self.limit),
                )
            )
        return tuple(result)

    def concurrency(self, layout: Layout) -> int:
        """Sequences of full length that one instance holds; negative: not even the
        weights fit."""
        return min(MOST_BATCH, *(n.sequences for n in self.needs(layout)))

    # ---- one point ---------------------------------------------------------------

    def point(
        self, layout: Layout, instances: int, batch: int, prefill_instances: int = 0
    ) -> Point:
        """Price of ``batch`` sequences in flight on each (decoding) instance."""
        w, engine = self.workload, self.pricer.engine
        context = w.prompt_len + w.output_len // 2
        waves = min(layout.pp, batch)
        decode = self.pricer.decode(layout, batch / waves, context)
        prefill = self.pricer.prefill(layout, 1, w.prompt_len)
        passing = max(decode.latency_s, waves * decode.seconds)
        prompt_s = prefill.latency_s * engine.prefill
        stage_s = prefill.seconds * engine.prefill
        if prefill_instances:
            tpot = passing
            decoding = instances - prefill_instances
            rate = min(
                decoding * batch / (tpot * w.output_len),
                prefill_instances / stage_s,
            )
            ttft = engine.request_s + engine.token_s * w.prompt_len
            ttft += prompt_s + self._transfer_s(layout)
        else:
            ttft, tpot = closed_loop(
                decode, prefill, batch, waves, w.prompt_len, w.output_len, engine
            )
            rate = instances * batch / (w.output_len * tpot + prompt_s)
        tokens = rate * w.output_len
        fits = batch <= self.concurrency(layout)
        late = w.ttft_limit_s is not None and ttft > w.ttft_limit_s
        slow = w.tpot_limit_s is not None and tpot > w.tpot_limit_s
        short = w.arrival_per_s is not None and rate < w.arrival_per_s
        meets = fits and not (late or slow or short)
        return Point(
            layout, instances, batch, ttft, tpot, tokens, decode, prefill, fits, meets,
            prefill_instances,
        )  # fmt: skip

    def _transfer_s(self, layout: Layout) -> float:
        """One prompt's cache from a prefill to a decode instance, all GPUs at once."""
        needed = max(n.sequence for n in self.needs(layout))
        nbytes = needed * self.workload.prompt_len / self.length
        same = 2 * layout.gpus <= self.cluster.gpus_per_node
        group = self.cluster.groups[0]
        rate = group.link.bytes_per_s if same else self.cluster.network.bytes_per_s
        return nbytes / rate

    # ---- the space ---------------------------------------------------------------

    def layouts(
        self, pins: Mapping[str, PinValue]
    ) -> tuple[list[Layout], tuple[str, ...]]:
        """Legal layouts, and why other tensor degrees are not."""
        gpus = self.cluster.num_gpus
        node = min(gpus, self.cluster.gpus_per_node)
        experts = max(
            (p.experts for layer, _ in self.model.layers for p in layer.products)
        )
        found: list[Layout] = []
        illegal: list[str] = []
        for tp in range(1, gpus + 1):
            if tp > node and tp % node:
                continue
            if "tp" in pins and tp != pins["tp"]:
                continue
            reason = illegal_tp(self.model, tp, self.pricer.formats)
            if reason:
                illegal.append(f"tp={tp}: {reason}")
            for pp in range(1, gpus // tp + 1):
                if pp > self.model.depth or ("pp" in pins and pp != pins["pp"]):
                    continue
                for ep, dp in _expert_ways(tp, experts):
                    if reason and dp != tp:
                        continue
                    if "ep" in pins and ep != pins["ep"]:
                        continue
                    found.append(Layout(tp, pp, ep, dp))
        return found, tuple(illegal)

    def points(self, layout: Layout) -> Iterator[Point]:
        """All instances and batches of one layout that the search looks at."""
        w = self.workload
        most = self.cluster.num_gpus // layout.gpus
        capacity = self.concurrency(layout)
        batches = [w.batch] if w.batch else [b for b in BATCHES if b <= capacity]
        if not w.batch and capacity > 0:
            batches = sorted({*batches, capacity})
        counts = [most] if w.objective != "gpus" else list(range(1, most + 1))
        for instances in counts:
            for split in _splits(instances, w.objective):
                last: Point | None = None
                for batch in batches:
                    point = self.point(layout, instances, batch, split)
                    yield point
                    if last is not None and last.meets and not point.meets:
                        yield from self._refined(last, point)
                    last = point

    def _refined(self, good: Point, bad: Point) -> Iterator[Point]:
        """Batches between the last that meets the limits and the first that misses."""
        low, high = good.batch, bad.batch
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            point = self.point(
                good.layout, good.instances, middle, good.prefill_instances
            )
            yield point
            if point.meets:
                low = middle
            else:
                high = middle

    def search(self, pins: Mapping[str, PinValue] | None = None) -> Found:
        """The best point; InfeasibleError says which limit and what would do."""
        layouts, illegal = self.layouts(pins or {})
        if not layouts:
            raise InfeasibleError(
                "no way to divide the model is legal",
                "; ".join(illegal[:4]) or f"pins {dict(pins or {})}",
                "drop a pin, or another number of GPUs",
            )
        points: list[Point] = []
        for layout in layouts:
            if self.concurrency(layout) < 1:
                continue
            points.extend(self.points(layout))
        good = [p for p in points if p.meets]
        if not good:
            from planner.serving.infeasible import explain

            raise explain(self, layouts, points)
        best = min(good, key=lambda p: rank(p, self.workload, self.cluster.num_gpus))
        return Found(
            best,
            tuple(points),
            self.concurrency(best.layout),
            illegal,
            self.binds(best),
            len(points) + sum(self.concurrency(x) < 1 for x in layouts),
            len(points) - len(good) + sum(self.concurrency(x) < 1 for x in layouts),
        )

    def binds(self, point: Point) -> str:
        """What keeps the point from doing more."""
        w = self.workload
        step = point.decode
        parts = dict(step.parts)
        links = parts["tp_comm"] + parts["ep_comm"] + parts["pp_p2p"]
        shares = {
            "HBM bandwidth": step.memory_s + parts["attention"],
            "compute": step.compute_s,
            "links": links,
            "kernel launches and the host": parts["host"],
        }
        first = max(shares, key=lambda name: shares[name])
        limit = ""
        following = self.point(
            point.layout, point.instances, point.batch + 1, point.prefill_instances
        )
        if w.objective != "latency" and not w.batch:
            if not following.fits:
                limit = f"; the batch by cache memory (at most {point.batch} fit)"
            elif w.tpot_limit_s and following.tpot_s > w.tpot_limit_s:
                limit = "; the batch by the TPOT limit"
            elif w.ttft_limit_s and following.ttft_s > w.ttft_limit_s:
                limit = "; the batch by the TTFT limit"
        return f"decode by {first}{limit}"


def _expert_ways(tp: int, experts: int) -> list[tuple[int, int]]:
    """(ep, attention_dp) ways of ``tp`` ranks."""
    ways = [(1, 1)]
    if experts > 1 and tp > 1:
        degrees = [d for d in divisors(tp) if d > 1 and experts % d == 0]
        ways += [(d, 1) for d in degrees if d == tp]
        if experts % tp == 0:
            ways.append((tp, tp))
    return ways


def _splits(instances: int, objective: str) -> list[int]:
    """Instances that only prefill; 0: every instance does both."""
    if objective != "throughput" or instances < 2:
        return [0]
    return [0, *sorted({1, instances // 4, instances // 2} - {0})]


def rank(point: Point, w: Inference, gpus: int) -> tuple[float, ...]:
    """Less is better; ties go to fewer GPUs, then smaller degrees and batches."""
    total = point.ttft_s + (w.output_len - 1) * point.tpot_s
    layout = point.layout
    tie = (
        point.gpus, layout.tp, layout.pp, layout.ep, layout.attention_dp,
        point.prefill_instances, point.batch,
    )  # fmt: skip
    if w.objective == "latency":
        alone = point.batch if w.batch is None else 1
        return (alone if not w.arrival_per_s else 0, total, *tie)
    if w.objective == "gpus":
        return (point.gpus, -point.tokens_per_s, *tie)
    if w.objective == "cost":
        return (point.gpus / max(point.tokens_per_s, 1e-12), *tie)
    return (-point.tokens_per_s / gpus, *tie)


def pareto(points: tuple[Point, ...], most: int = 24) -> tuple[Point, ...]:
    """Points that no other beats in both throughput and time per token."""
    ordered = sorted(
        (p for p in points if p.fits), key=lambda p: (p.tpot_s, -p.tokens_per_s)
    )
    front: list[Point] = []
    for p in ordered:
        if not front or p.tokens_per_s > front[-1].tokens_per_s * (1 + 1e-9):
            front.append(p)
    if len(front) <= most:
        return tuple(front)
    step = (len(front) - 1) / (most - 1)
    return tuple(front[round(i * step)] for i in range(most))
