"""Prices of one step of a server: prefill of prompts, or one decoded token each.

A step with T tokens of B sequences on one pipeline stage costs, per layer,

    products(T) + attention(B, q, context) + cache write + pointwise + collectives

and once per step the head on B rows and the engine's host time. Products of quantised
weights are memory-bound at few tokens (fewer weight bytes) and compute-bound at many
(unpacking, or the GPU's 8-bit peak). With ``attention_dp`` groups each holds 1/groups
of the sequences; experts lie on ``ep`` ranks and see all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from cost_models.attention import (
    BEFORE_AMPERE,
    attention_constants,
    attention_time,
    kv_cache_write_time,
)
from cost_models.gemm import gemm_time, priced, quantise_time, weight_only_gemm_time
from cost_models.hardware import ClusterSpec, DeviceSpec
from cost_models.roofline import OpTime, op_time, pointwise_time
from planner.errors import PlannerError
from planner.search.mesh import Mesh, MeshComm
from planner.serving.engines import Engine
from planner.serving.kv_cache import CACHE_BYTES, Formats, cut, is_attention
from planner.serving.model import Attention, Layer, Product, ServingModel

#: Passes over the residual stream per layer: two norms with their additions.
STREAM_PASSES = 6
PARTS = (
    "products",
    "products_over",
    "experts",
    "experts_over",
    "attention",
    "pointwise",
    "tp_comm",
    "ep_comm",
    "pp_p2p",
    "host",
)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step by part, on the slowest stage; ``latency_s`` is one pass
    through all stages."""

    parts: tuple[tuple[str, float], ...]
    latency_s: float
    flops: float
    weight_bytes: float
    compute_s: float  # time that the compute roofline alone would take
    memory_s: float

    @property
    def seconds(self) -> float:
        """Of the slowest stage: what one step adds where stages overlap."""
        return sum(s for _, s in self.parts)


@dataclass(frozen=True, slots=True)
class Layout:
    """One instance: ``tp`` x ``pp`` GPUs; experts over ``ep`` of the tensor ranks and
    attention repeated on ``attention_dp`` groups of them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp


@dataclass
class Pricer:
    """Prices steps of one model on one cluster with one engine.

    Raises PlannerError for weight formats that have no kernel on the GPU.
    """

    model: ServingModel
    cluster: ClusterSpec
    engine: Engine
    formats: Formats = field(default_factory=Formats)

    def __post_init__(self) -> None:
        device = self.device
        self.activation = _activation(device, self.formats)
        self.native = _native(device, self.formats)
        self.kernel = "efficient" if device.arch in BEFORE_AMPERE else "flash"
        self._steps: dict[tuple[object, ...], Step] = {}

    @property
    def device(self) -> DeviceSpec:
        return self.cluster.device

    # ---- products ----------------------------------------------------------------

    def product(self, p: Product, tokens: float, tp: int, ep: int) -> OpTime:
        """One product over ``tokens`` rows on one rank."""
        if p.experts > 1:
            return self._grouped(p, tokens, tp, ep)
        n = p.n // tp if p.split == "column" else p.n
        k = p.k // tp if p.split == "row" else p.k
        return self._dense(max(1, round(tokens)), max(1, n), max(1, k), p.quantised)

    def _dense(self, m: int, n: int, k: int, quantised: bool) -> OpTime:
        return dense_time(
            self.device, m, n, k, self.formats if quantised else Formats(
                _plain(self.activation), self.formats.kv
            ), self.activation, self.native if quantised else "",
        )  # fmt: skip

    def _grouped(self, p: Product, tokens: float, tp: int, ep: int) -> OpTime:
        """Experts on a rank: those that a token reaches are read, rows spread evenly.

        Of E experts, T tokens that each choose c reach E (1 - (1 - c/E)^T)."""
        inner = max(1, tp // ep)
        n = max(1, p.n // inner if p.split == "column" else p.n)
        k = max(1, p.k // inner if p.split == "row" else p.k)
        held = ceil(p.experts / ep)
        reached = max(1.0, held * (1 - (1 - p.chosen / p.experts) ** tokens))
        rows = tokens * p.chosen * held / p.experts
        each = max(1.0, rows / reached)
        dtype = self.native or self.activation
        size = self.formats.element_bytes
        x = 1.0 if self.native else 2.0
        nbytes = reached * n * k * size + rows * (k * x + n * 2)
        return priced(self.device, each, n, k, reached, dtype, nbytes)

    # ---- one layer ---------------------------------------------------------------

    def _attention(
        self, a: Attention, sequences: float, q_len: int, context: int, tp: int
    ) -> float:
        """Seconds of one attention of a rank, cache write included."""
        batch = max(1, round(sequences))
        heads = max(1, ceil(a.q_heads / tp))
        kv = max(1, ceil(a.kv_heads / tp))
        heads = ceil(heads / kv) * kv  # padded where ranks do not divide them
        size = CACHE_BYTES[self.formats.kv]
        dtype = self.activation if size >= 2 or self.kernel != "flash" else "fp8"
        if not self.device.supports(dtype):
            dtype = self.activation
        written = kv_cache_write_time(
            self.device, batch, 1 if a.latent else kv, q_len,
            a.latent // 2 if a.latent else a.qk_dim,
            a.latent - a.latent // 2 if a.latent else a.v_dim,
        ).time_s  # fmt: skip
        if a.latent and q_len == 1:
            core = latent_decode_time(
                self.device, batch, heads, context, a.latent, size, self.activation
            )
        else:
            core = attention_time(
                self.device, batch, heads, kv, q_len, max(context, q_len),
                a.qk_dim, a.v_dim, self.activation, a.causal, self.kernel,
                window=a.window if a.window < max(context, q_len) else 0,
            ).time_s  # fmt: skip
            if q_len == 1 and size < 2:
                core *= size / 2 if core > 2 * self.device.kernel_s else 1.0
        return core * self.engine.attention + written

    def layer(
        self,
        layer: Layer,
        layout: Layout,
        tokens: float,
        sequences: float,
        q_len: int,
        context: int,
        comm: MeshComm,
    ) -> dict[str, float]:
        """Seconds of one layer by part, and its roofline sums under ``_`` names."""
        groups = layout.attention_dp
        attention_tp = max(1, layout.tp // groups)
        out = dict.fromkeys(PARTS, 0.0) | {"_compute": 0.0, "_memory": 0.0}
        out |= {"_flops": 0.0, "_weights": 0.0}
        for p in layer.products:
            attends = bool(layer.attentions) and is_attention(layer, p)
            rows = tokens / groups if attends else tokens
            tp = attention_tp if attends else layout.tp
            if _absorbed(layer, p) and q_len == 1:
                t = self._absorbed_time(layer, p, rows, tp)
            else:
                t = self.product(p, rows, tp, layout.ep)
            self._product(out, p, t)
            out["_compute"] += t.compute_s
            out["_memory"] += t.memory_s
            out["_flops"] += t.flops
        for a in layer.attentions:
            out["attention"] += self._attention(
                a, sequences / groups, q_len, context, attention_tp
            )
        width = self.model.hidden * 2.0
        stream = STREAM_PASSES * tokens * width / 2
        middle = sum(
            p.n * tokens * p.chosen * 2.0 / layout.tp
            for p in layer.products
            if p.split == "column"
        )
        moved = pointwise_time(self.device, stream + middle, stream + middle / 2)
        state = layer.state_elements * 4.0 * sequences / layout.tp
        moved_s = moved.time_s + 2 * state / self.device.hbm_bytes_per_s
        out["pointwise"] += moved_s * self.engine.stream
        kernels = self.engine.kernels + (4 if _has_experts(layer) else 0)
        out["host"] += kernels * self.engine.launch_s
        self._communicate(out, layer, layout, tokens, comm)
        return out

    def _product(self, out: dict[str, float], p: Product, t: OpTime) -> None:
        """Adds a product: its roofline, and what kernels take over that at the
        engine's rate, so that no rate beats the roofline."""
        name, rate = "products", self.engine.matrix
        if p.experts > 1:
            name, rate = "experts", self.engine.experts
        limit = self._roofline(t)
        out[name] += limit
        out[f"{name}_over"] += (t.time_s - limit) * rate

    def _roofline(self, t: OpTime) -> float:
        device = self.device
        peak = device.peak(self.native or self.activation)
        return min(t.time_s, max(t.flops / peak, t.bytes / device.hbm_bytes_per_s))

    def _absorbed_time(self, layer: Layer, p: Product, rows: float, tp: int) -> OpTime:
        """The key-value up-projection, folded into queries and outputs: two batched
        products of one row block per head."""
        heads = max(1, layer.attentions[0].q_heads // tp)
        each = p.n // layer.attentions[0].q_heads
        m = max(1, round(rows))
        return gemm_time(self.device, m, each, p.k, heads, self.activation)

    def _communicate(
        self,
        out: dict[str, float],
        layer: Layer,
        layout: Layout,
        tokens: float,
        comm: MeshComm,
    ) -> None:
        nbytes = tokens * self.model.hidden * 2.0
        rate = self.engine.comm
        if layout.attention_dp < layout.tp:
            share = nbytes / layout.attention_dp
            size = layout.tp // layout.attention_dp
            inner = comm if size == layout.tp else self.comm(Layout(size))
            out["tp_comm"] += rate * inner.seconds("tp", "all_reduce", share)
        if layout.tp == 1:
            return
        if layout.attention_dp > 1:
            # tokens of all groups are gathered before the experts and scattered after
            for kind in ("all_gather", "reduce_scatter"):
                out["ep_comm"] += rate * comm.seconds("tp", kind, nbytes)
        else:
            out["tp_comm"] += rate * comm.seconds("tp", "all_reduce", nbytes)

    def comm(self, layout: Layout) -> MeshComm:
        return MeshComm(self.cluster, Mesh(pp=layout.pp, tp=layout.tp))

    # ---- a step ------------------------------------------------------------------

    def step(self, layout: Layout, sequences: float, q_len: int, context: int) -> Step:
        """One step of ``sequences`` sequences, ``q_len`` new tokens each (1: decode),
        over ``context`` cached tokens in all. One micro-batch of a pipeline."""
        context = _coarse(context) if q_len == 1 else context
        key = (layout, sequences, q_len, context)
        if key not in self._steps:
            self._steps[key] = self._price(layout, sequences, q_len, context)
        return self._steps[key]

    def _price(
        self, layout: Layout, sequences: float, q_len: int, context: int
    ) -> Step:
        comm, tokens = self.comm(layout), sequences * q_len
        worst: dict[str, float] = {}
        latency = flops = weights = 0.0
        kinds: dict[Layer, dict[str, float]] = {}
        for number, layers in enumerate(cut(self.model, layout.pp)):
            total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
            total |= {"_compute": 0.0, "_memory": 0.0, "_flops": 0.0, "_weights": 0.0}
            for layer, count in layers:
                if layer not in kinds:
                    kinds[layer] = self.layer(
                        layer, layout, tokens, sequences, q_len, context, comm
                    )
                for name, value in kinds[layer].items():
                    total[name] += value * count
            if number == layout.pp - 1:
                head = self._dense(
                    max(1, round(sequences)),
                    max(1, ceil(self.model.vocab / layout.tp)),
                    self.model.hidden,
                    False,
                )
                limit = self._roofline(head)
                total["products"] += limit
                total["products_over"] += (head.time_s - limit) * self.engine.matrix
                total["_compute"] += head.compute_s
                total["_memory"] += head.memory_s
                total["_flops"] += head.flops
            else:
                nbytes = tokens * self.model.hidden * 2.0
                total["pp_p2p"] += comm.p2p(nbytes)
            seconds = sum(total[name] for name in PARTS)
            latency += seconds
            flops += total["_flops"] * layout.tp
            if seconds >= sum(worst.get(name, 0.0) for name in PARTS):
                worst = total
        host = self.engine.step_s + self.engine.sequence_s * sequences
        worst["host"] += host
        return Step(
            tuple((name, worst[name]) for name in PARTS),
            latency + host,
            flops,
            weights,
            worst["_compute"],
            worst["_memory"],
        )

    def prefill(self, layout: Layout, prompts: float, prompt_len: int) -> Step:
        """Prefill of ``prompts`` prompts at once."""
        return self.step(layout, prompts, prompt_len, prompt_len)

    def decode(self, layout: Layout, sequences: float, context: int) -> Step:
        """One token for each of ``sequences`` sequences."""
        return self.step(layout, sequences, 1, context)


def _coarse(context: int) -> int:
    """Contexts within 3 % share a price."""
    step = max(1, context // 32)
    return max(1, round(context / step) * step)


def _has_experts(layer: Layer) -> bool:
    return any(p.experts > 1 for p in layer.products)


def _absorbed(layer: Layer, p: Product) -> bool:
    """The up-projection of a latent cache (it widens the latent to all heads)."""
    latent = layer.attentions[0].latent if layer.attentions else 0
    return bool(latent) and p.k < latent and p.split == "column" and p.experts == 1


def _plain(activation: str) -> str:
    return activation if activation in ("fp16", "fp32") else "bf16"


def _activation(device: DeviceSpec, formats: Formats) -> str:
    if formats.weights in ("fp16", "fp32"):
        return formats.weights
    return "bf16" if device.supports("bf16") else "fp16"


def _native(device: DeviceSpec, formats: Formats) -> str:
    """The 8- or 4-bit dtype that products compute in; "" where weights are unpacked."""
    w = formats.weights
    if w in ("fp8", "int8", "fp4") and formats.eight_bit_math and device.supports(w):
        return w
    if w == "fp4":
        raise PlannerError(
            "the GPU has no 4-bit floating point", device.name, "use int4 weights"
        )
    return ""


@lru_cache(maxsize=1 << 16)
def dense_time(
    device: DeviceSpec,
    m: int,
    n: int,
    k: int,
    formats: Formats,
    activation: str,
    native: str,
) -> OpTime:
    """A product of ``m`` rows with weights in ``formats``; the cheaper of the kernels
    that engines choose from (unpacking inside, or computing natively)."""
    if native:
        base = gemm_time(device, m, n, k, 1, native)
        if native in ("fp8", "int8"):
            cast = quantise_time(device, m, k, native)
            fused = max(0.0, cast.time_s - device.kernel_s) * 0.5
            base = _longer(base, fused)
        return base
    if formats.weights in ("int4", "int8", "fp8"):
        bits = 4 if formats.weights == "int4" else 8
        group = formats.group if bits == 4 else k
        fused = weight_only_gemm_time(device, m, n, k, bits, group, activation)
        plain = gemm_time(device, m, n, k, 1, activation)
        # or: unpack once into 16 bits, then a plain product
        apart = n * k * (bits / 8 + 2) / device.hbm_bytes_per_s
        return fused if fused.time_s <= plain.time_s + apart else _longer(plain, apart)
    return gemm_time(device, m, n, k, 1, activation)


def latent_decode_time(
    device: DeviceSpec,
    batch: int,
    heads: int,
    context: int,
    latent: int,
    size: float,
    dtype: str,
) -> float:
    """Decode over a compressed cache: all heads of a rank are the rows of one tile.

    t = floor + max(latent bytes / HBM, 4 heads context latent / peak), with the GPU's
    fitted fractions of both."""
    c = attention_constants(device, dtype)
    nbytes = batch * context * latent * size
    flops = 4.0 * batch * max(heads, 64) * context * latent
    active = min(1.0, batch * max(1, context // 128) / device.sm_count)
    memory = nbytes / (device.hbm_bytes_per_s * min(c.mem, active * c.sm_load))
    compute = flops / (device.peak(dtype) * c.eff * max(active, 1 / device.sm_count))
    return device.kernel_s * c.decode_floor + max(memory, compute)


def _longer(t: OpTime, seconds: float) -> OpTime:
    return op_time(
        t.time_s + seconds, t.compute_s, t.memory_s, t.launch_s, t.flops, t.bytes, 1.0
    )


def closed_loop(
    decode: Step,
    prefill: Step,
    batch: int,
    waves: int,
    prompt_len: int,
    output_len: int,
    engine: Engine,
) -> tuple[float, float]:
    """(time to first token, time per token) of ``batch`` requests kept in flight.

    tpot = pass + (batch - 1) / output_len x prefill (1 - overlap): each sequence's
    prompt takes its turn once in output_len steps. ttft = request + prompt tokens x
    token + wait x pass + prefill (1 + burst (batch - 1)). ``prefill`` is of one prompt;
    ``waves`` micro-batches of a pipeline make one pass of all sequences.
    """
    passing = max(decode.latency_s, waves * decode.seconds)
    chunk = prefill.latency_s * engine.prefill
    stage = prefill.seconds * engine.prefill
    tpot = passing + (batch - 1) / output_len * stage * (1 - engine.overlap)
    ttft = engine.request_s + engine.token_s * prompt_len + engine.wait * passing
    return ttft + chunk * (1 + engine.burst * (batch - 1)), tpot
