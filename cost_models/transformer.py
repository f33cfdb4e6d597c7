"""Memory of transformers from dimensions alone: elements and activations per rank.

The planner counts both on the traced graph; this module serves rows and questions that
give dimensions only, and is the oracle that the traced counts are tested against.

A layer keeps for backward, per token, ``replicated x h`` bytes that tensor parallelism
does not divide (norm inputs, dropout masks; sequence parallelism does), ``attention x
h`` bytes beside the heads' q, k, v and ``ffn x f`` bytes that it divides, ``gathered x
h`` bytes at full length where the stack keeps all-gathered inputs, and ``score`` bytes
per entry of the attention matrix where attention is not fused. Korthikanti et al. 2022:
s b h (10 + 24 / t + 5 a s / (h t)).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from math import ceil
from typing import Any

from cost_models.errors import SpecError
from cost_models.memory import (
    MIB,
    RECIPES,
    MemoryInputs,
    ParameterGroup,
)
from cost_models.pipeline import in_flight


@dataclass(frozen=True, slots=True)
class TransformerDims:
    """A decoder; ``experts`` > 0 replace the MLP of all but ``dense_layers`` layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    gated: bool = False
    tied: bool = True
    head_dim: int = 0  # 0: hidden / heads
    learned_positions: bool = False
    experts: int = 0
    top_k: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    attention_weights: int = 0  # where attention is not plain (latent): its weights

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_elements(self) -> int:
        """Weights of q, k, v and the output projection."""
        if self.attention_weights:
            return self.attention_weights
        width = self.heads + self.kv_heads
        return 2 * self.hidden * width * self.head_size

    @property
    def dense_elements(self) -> int:
        """Weights of one dense layer with biases of norms and linears left out."""
        return self.attention_elements + self._mlp(self.ffn)

    @property
    def expert_elements(self) -> int:
        """Weights of one expert."""
        return self._mlp(self.expert_ffn or self.ffn)

    def _mlp(self, ffn: int) -> int:
        return (3 if self.gated else 2) * self.hidden * ffn

    @property
    def small_elements(self) -> int:
        """Norms and biases of one layer, about 13 h in all (GPT)."""
        return 4 * self.hidden


@dataclass(frozen=True, slots=True)
class Split:
    """How a job divides the model; as planner's parallelism, with numbers only."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    virtual: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0  # tensor parallelism of experts; 0: as tp
    zero: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    layers_per_stage: tuple[int, ...] = ()
    schedule: str = "1f1b"
    optimizer_replicas: int = 1  # copies of ZeRO's shards over the dp x cp ranks


@dataclass(frozen=True, slots=True)
class ActivationProfile:
    """What a software stack keeps; see the module's docstring for the units.

    ``ffn`` is for plain MLPs, ``gated_ffn`` for gated ones. ``loss_peak`` and
    ``loss_saved``: bytes per logit; ``loss_held``: of the previous micro-batch, still
    referenced as the next one runs; ``loss_gathered``: at full vocabulary, where the
    stack keeps all-gathered tensors. ``working_hidden`` and ``working_ffn``: bytes per
    token x h and token x f that backward of one layer holds beside the saved ones.
    ``routed``: bytes per routed token x h around the experts. ``gradient``: bytes per
    parameter that flow before they are added to the resident gradients.
    ``optimizer_temporary``: bytes per updated parameter while the optimizer steps (an
    unfused Adam: FP32 gradients and two temporaries). ``workspace_bytes``: beside
    cuBLAS. ``margin``: share of activations that allocator blocks add.
    ``unit_layers``: layers in one gathered ZeRO-3 unit. ``recipe``: by name in
    :data:`cost_models.memory.RECIPES`.
    """

    name: str
    replicated: float
    attention: float
    ffn: float
    gated_ffn: float
    score: float = 0.0
    gathered: float = 0.0
    loss_peak: float = 6.0
    loss_saved: float = 6.0
    loss_held: float = 0.0
    loss_gathered: float = 0.0
    working_hidden: float = 0.0
    working_ffn: float = 0.0
    routed: float = 8.0
    gradient: float = 0.0
    optimizer_temporary: float = 0.0
    workspace_bytes: float = 64.0 * MIB
    margin: float = 0.0
    unit_layers: float = 0.0  # layers in one gathered ZeRO-3 unit
    recipe: str = "bf16_fp32_gradients"


#: Korthikanti et al. 2022, equation 2: unfused attention with dropout, GELU MLP.
KORTHIKANTI = ActivationProfile(
    name="korthikanti",
    replicated=10,
    attention=2,
    ffn=4,
    gated_ffn=6,
    score=5,
    workspace_bytes=0.0,
)


@lru_cache(maxsize=1)
def _profile_table() -> dict[str, dict[str, Any]]:
    file = resources.files("cost_models") / "specs" / "memory_profiles.json"
    return json.loads(file.read_text(encoding="utf-8"))["profiles"]


@lru_cache(maxsize=32)
def load_activation_profile(name: str) -> ActivationProfile:
    """A stack's profile by name, from ``specs/memory_profiles.json`` (fitted by
    ``benchmarks/fit/fit_memory.py``); raises SpecError with the known names."""
    table = _profile_table()
    if name not in table:
        raise SpecError("unknown activation profile", name, f"use {', '.join(table)}")
    return ActivationProfile(name=name, **table[name])


def stage_layers(dims: TransformerDims, split: Split, stage: int) -> int:
    """Layers of all chunks of one rank; uneven splits give the first ranks one more."""
    if split.layers_per_stage:
        return split.layers_per_stage[stage]
    if not 0 <= stage < split.pp:
        raise SpecError("no such pipeline stage", f"{stage} of {split.pp}")
    base, rest = divmod(dims.layers, split.pp)
    return base + (1 if stage < rest else 0)


def cost_balanced_layers(
    layers: int, layer_cost: float, head_cost: float, stages: int, strict: bool = False
) -> tuple[int, ...]:
    """Layers per stage where a stack balances cost, head included, not layers.

    Layer by layer, a stage is closed once the cost so far reaches (``strict``: exceeds)
    its share of the total.
    """
    total = layers * layer_cost + head_cost
    found, stage, cost = [0] * stages, 0, 0.0
    slack = 1e-9 if strict else -1e-9
    for _ in range(layers):
        found[stage] += 1
        cost += layer_cost
        share = total * (stage + 1) / stages
        if stage < stages - 1 and cost >= share * (1 + slack):
            stage += 1
    return tuple(found)


def rank_parameters(
    dims: TransformerDims, split: Split, stage: int
) -> tuple[ParameterGroup, ...]:
    """Parameters of one rank: what all layers share out, and its experts apart."""
    layers = stage_layers(dims, split, stage)
    moe = max(0, layers - _dense_of(dims, split, stage)) if dims.experts else 0
    dense = layers - moe
    split_elements = dense * dims.dense_elements + moe * dims.attention_elements
    if dims.shared_ffn:
        split_elements += moe * (3 if dims.gated else 2) * dims.hidden * dims.shared_ffn
    table = dims.vocab * dims.hidden
    first, last = stage == 0, stage == split.pp - 1
    if first:
        split_elements += table
    if last and (split.pp > 1 or not dims.tied):
        split_elements += table
    whole = layers * dims.small_elements + moe * dims.experts * dims.hidden
    if first and dims.learned_positions:
        whole += dims.seq_len * dims.hidden
    copies = split.optimizer_replicas
    shard = max(1, split.dp * split.cp // copies)
    groups = [ParameterGroup(split_elements / split.tp + whole, shard)]
    if moe:
        etp = split.etp or split.tp
        ranks = split.tp * split.cp * split.dp
        local = moe * dims.expert_elements * dims.experts / split.ep / etp
        shard = max(1, ranks // (split.ep * etp * copies))
        groups.append(ParameterGroup(local, shard))
    return tuple(groups)


def _dense_of(dims: TransformerDims, split: Split, stage: int) -> int:
    """Dense layers come first."""
    before = sum(stage_layers(dims, split, k) for k in range(stage))
    return max(0, min(dims.dense_layers - before, stage_layers(dims, split, stage)))


def layer_bytes(
    dims: TransformerDims, split: Split, profile: ActivationProfile, moe: bool = False
) -> float:
    """Bytes that one layer saves for one micro-batch on one rank."""
    h, d = dims.hidden, dims.head_size
    tokens = dims.seq_len / split.cp * split.micro_batch
    tp = split.tp
    own = tp if split.sequence_parallel else 1
    qkv = 2 * (dims.heads + 2 * dims.kv_heads) * d
    total = tokens * profile.replicated * h / own
    total += tokens * (profile.attention * h + qkv) / tp
    if split.sequence_parallel and tp > 1:
        total += tokens * profile.gathered * h
    total += (
        profile.score * dims.heads / tp * dims.seq_len * tokens  # s x s per sample
    )
    per_ffn = profile.gated_ffn if dims.gated else profile.ffn
    if not moe:
        return total + tokens * per_ffn * dims.ffn / tp
    etp = split.etp or tp
    routed = tokens * dims.top_k / own * (etp if own > 1 else 1)
    total += routed * (
        profile.routed * h + per_ffn * (dims.expert_ffn or dims.ffn) / etp
    )
    return total + tokens * per_ffn * dims.shared_ffn / tp


def activation_bytes(
    dims: TransformerDims, split: Split, profile: ActivationProfile, stage: int
) -> tuple[float, float]:
    """(saved per micro-batch by a rank's layers, working set of one layer)."""
    layers = stage_layers(dims, split, stage)
    dense = _dense_of(dims, split, stage) if dims.experts else layers
    one = layer_bytes(dims, split, profile)
    other = layer_bytes(dims, split, profile, moe=True) if dims.experts else 0.0
    saved = dense * one + (layers - dense) * other
    largest = max(one if dense else 0.0, other)
    tokens = dims.seq_len / split.cp * split.micro_batch
    flowing = tokens / split.tp * profile.working_hidden * dims.hidden
    flowing += tokens / split.tp * profile.working_ffn * dims.ffn
    if split.recompute == "full":
        own = split.tp if split.sequence_parallel else 1
        return layers * 2 * tokens * dims.hidden / own, largest + flowing
    if split.recompute == "selective":
        scores = profile.score * dims.heads / split.tp * dims.seq_len * tokens
        return saved - layers * scores, scores + flowing
    return saved, flowing


def rank_memory(
    dims: TransformerDims,
    split: Split,
    profile: ActivationProfile,
    stage: int,
    device_memory_bytes: float,
    arch: str = "ampere",
    optimizer: str = "adamw",
    live: float | None = None,
) -> MemoryInputs:
    """Everything that :func:`cost_models.memory.training_memory` needs for one rank.

    ``live``: micro-batches in flight, where the schedule's own rule does not hold.
    """
    groups = rank_parameters(dims, split, stage)
    saved, working = activation_bytes(dims, split, profile, stage)
    last = stage == split.pp - 1
    tokens = ceil(dims.seq_len / split.cp) * split.micro_batch
    logits = tokens * dims.vocab / split.tp if last else 0.0
    held = profile.loss_held if split.micro_batches > 1 else 0.0
    if split.sequence_parallel:
        held += profile.loss_gathered * split.tp
    schedule = "interleaved" if split.virtual > 1 else split.schedule
    if live is None:
        live = in_flight(schedule, stage, split.pp, split.micro_batches, split.virtual)
    own = split.tp if split.sequence_parallel else 1
    message = 2 * tokens * dims.hidden / own
    tables = (stage == 0) + (last and (split.pp > 1 or not dims.tied))
    elements = sum(g.elements for g in groups)
    elements -= tables * dims.vocab * dims.hidden / split.tp  # theirs come last
    return MemoryInputs(
        device_memory_bytes=device_memory_bytes,
        groups=groups,
        recipe=RECIPES[profile.recipe],
        unit_elements=profile.unit_layers * dims.dense_elements / split.tp,
        optimizer=optimizer,
        zero=split.zero,
        micro_batches=split.micro_batches,
        gradients_always=True,
        bucket_bytes=profile.gradient * elements,
        activation_bytes=saved * (1 + profile.margin),
        in_flight=live,
        working_bytes=working,
        logits_bytes=logits * (profile.loss_peak + held),
        logits_saved_bytes=logits * (profile.loss_saved + held),
        p2p_buffer_bytes=message if split.pp > 1 else 0.0,
        optimizer_temporary=profile.optimizer_temporary,
        workspace_bytes=profile.workspace_bytes,
        arch=arch,
    )
