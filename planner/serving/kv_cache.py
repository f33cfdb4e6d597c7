"""Exact bytes of weights and of the KV cache, and how many sequences fit.

A rank of ``tp`` tensor ranks holds 1/tp of every divided product, a whole copy of a
repeated one, and the heads of its share of the cache (a latent cache whole). A pipeline
stage holds its layers' part of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from planner.errors import PlannerError
from planner.serving.model import Layer, Product, ServingModel

#: Bits of one stored weight. fp4: 4-bit floats in blocks of 16.
WEIGHT_BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4.0,
    "fp4": 4.0,
}
CACHE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
#: Elements of a 16-bit floating-point scale (and a packed zero) for int4.
DEFAULT_GROUP = 128
FP4_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Formats:
    """How weights and cache are stored. ``eight_bit_math``: products run in 8 bits
    where weights are fp8 or int8 and the GPU can (else weights are unpacked)."""

    weights: str = "bf16"
    kv: str = "bf16"
    group: int = DEFAULT_GROUP
    eight_bit_math: bool = True

    def __post_init__(self) -> None:
        for what, value, known in (
            ("weight format", self.weights, WEIGHT_BITS),
            ("KV cache format", self.kv, CACHE_BYTES),
        ):
            if value not in known:
                raise PlannerError(f"unknown {what}", value, f"use {', '.join(known)}")
        if self.group < 1:
            raise PlannerError("the quantisation group must be at least 1", self.group)

    @property
    def element_bytes(self) -> float:
        """Bytes of one quantised weight with its share of scales.

        int4: a 16-bit scale and a 4-bit zero per ``group``; fp4: an 8-bit scale per 16;
        fp8 and int8: one scale per output channel or 128 x 128 block, below 0.1 %.
        """
        bits = WEIGHT_BITS[self.weights]
        if self.weights == "int4":
            bits += (16 + 4) / self.group
        elif self.weights == "fp4":
            bits += 8 / FP4_BLOCK
        return bits / 8

    @property
    def plain_bytes(self) -> float:
        """Bytes of a weight that is not quantised (tables, norms, head, router)."""
        return 4.0 if self.weights == "fp32" else 2.0

    def product_bytes(self, product: Product) -> float:
        size = self.element_bytes if product.quantised else self.plain_bytes
        return product.elements * size


def weight_bytes(model: ServingModel, formats: Formats) -> float:
    """Bytes of all weights, once."""
    inside = sum(
        (
            sum(formats.product_bytes(p) for p in layer.products)
            + layer.other * formats.plain_bytes
        )
        * count
        for layer, count in model.layers
    )
    outside = model.embedding + model.head_elements + model.other
    return inside + outside * formats.plain_bytes


def kv_bytes_per_token(model: ServingModel, kv: str = "bf16") -> float:
    """Bytes that one more token costs while no window is full."""
    return CACHE_BYTES[kv] * sum(a.cached * n for a, n in model.attentions)


def sequence_bytes(
    model: ServingModel, length: int, kv: str = "bf16", windowed: bool = True
) -> float:
    """Cache of one sequence of ``length`` tokens, all ranks together (a latent once).

    ``windowed``: layers with a sliding window keep that many tokens; False: as an
    engine that allocates every layer in full length.
    """
    total = 0.0
    for attention, count in model.attentions:
        kept = attention.tokens_kept(length) if windowed else length
        total += attention.cached * kept * count
    states = sum(layer.state_elements * n for layer, n in model.layers)
    return (total + states) * CACHE_BYTES[kv]


@dataclass(frozen=True, slots=True)
class Shard:
    """One pipeline stage on ``tp`` ranks with experts over ``ep`` of them and attention
    repeated on ``attention_dp`` groups of tp / attention_dp ranks.

    layers: (kind, count) of this stage; first / last: it holds the tables / the head.
    """

    layers: tuple[tuple[Layer, int], ...]
    tp: int
    ep: int = 1
    attention_dp: int = 1
    first: bool = True
    last: bool = True

    @property
    def attention_tp(self) -> int:
        return max(1, self.tp // self.attention_dp)


def is_attention(layer: Layer, product: Product) -> bool:
    """Whether a product belongs to the attention half (before the feed-forward)."""
    if product.experts > 1:
        return False
    names = [p.name for p in layer.products]
    row = next((i for i, p in enumerate(layer.products) if p.split == "row"), -1)
    return names.index(product.name) <= row


def rank_elements(product: Product, tp: int, ep: int = 1) -> float:
    """Elements of a product on one rank."""
    if product.experts > 1:
        held = ceil(product.experts / ep)
        return product.n * product.k * held / max(1, tp // ep)
    return product.elements / (tp if product.split != "none" else 1)


def shard_weight_bytes(model: ServingModel, shard: Shard, formats: Formats) -> float:
    """Weight bytes of one rank of ``shard``, repeated KV heads included."""
    total = 0.0
    for layer, count in shard.layers:
        size = layer.other * formats.plain_bytes
        for product in layer.products:
            attends = bool(layer.attentions) and is_attention(layer, product)
            tp = shard.attention_tp if attends else shard.tp
            each = formats.element_bytes if product.quantised else formats.plain_bytes
            size += rank_elements(product, tp, shard.ep) * each
        size += _repeated_heads(layer, shard.attention_tp) * formats.element_bytes
        total += size * count
    tables = (model.embedding if shard.first else 0) / shard.tp
    if shard.last:
        # a tied head is the embedding, which another stage may hold
        held = model.vocab * model.hidden if not shard.first else model.head_elements
        tables += held / shard.tp + model.other
    return total + tables * formats.plain_bytes


def _repeated_heads(layer: Layer, tp: int) -> float:
    """Elements of key-value projections that a rank holds beyond its 1/tp."""
    first = layer.products[0]
    extra = 0.0
    for a in layer.attentions:
        if not a.latent and a.kv_heads < tp:
            width = a.qk_dim + a.v_dim
            extra += first.k * width * (1 - a.kv_heads / tp)
    return extra


def shard_sequence_bytes(
    shard: Shard, length: int, kv: str, windowed: bool = True
) -> float:
    """Cache of one sequence on one rank of ``shard``."""
    tp, total = shard.attention_tp, 0.0
    for layer, count in shard.layers:
        for a in layer.attentions:
            kept = a.tokens_kept(length) if windowed else length
            total += a.cached_on_rank(tp) * kept * count
        total += layer.state_elements / tp * count
    return total * CACHE_BYTES[kv]


def cut(model: ServingModel, pp: int) -> tuple[tuple[tuple[Layer, int], ...], ...]:
    """Layers of each of ``pp`` stages, as evenly as possible."""
    base, extra = divmod(model.depth, pp)
    flat = [layer for layer, count in model.layers for _ in range(count)]
    stages: list[tuple[tuple[Layer, int], ...]] = []
    start = 0
    for k in range(pp):
        size = base + (k < extra)
        runs: list[tuple[Layer, int]] = []
        for layer in flat[start : start + size]:
            if runs and runs[-1][0] == layer:
                runs[-1] = (layer, runs[-1][1] + 1)
            else:
                runs.append((layer, 1))
        stages.append(tuple(runs))
        start += size
    return tuple(stages)


def illegal_tp(model: ServingModel, tp: int, formats: Formats) -> str:
    """Why ``tp`` ranks can not divide the model; empty where they can."""
    for attention, _ in model.attentions:
        if attention.q_heads % tp:
            return f"{attention.q_heads} query heads do not divide by tp={tp}"
        kv = attention.kv_heads
        if not attention.latent and kv % tp and tp % kv:
            return f"{kv} key-value heads neither divide by nor into tp={tp}"
    for layer, _ in model.layers:
        for product in layer.products:
            wide = product.split == "column" and product.n % tp
            deep = product.split == "row" and product.k % tp
            if wide or deep:
                size = product.n if wide else product.k
                return f"{product.name}: {size} does not divide by tp={tp}"
            part = product.k // tp if product.split == "row" else product.k
            grouped = formats.weights == "int4" and product.quantised
            if grouped and product.split == "row" and part % formats.group:
                return (
                    f"{product.name}: {product.k}/{tp} = {part} is not whole "
                    f"groups of {formats.group}"
                )
    return ""
