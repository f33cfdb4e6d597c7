"""The part of a plan that only serving has. Seconds, bytes and plain ratios."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.plan.records import Bytes, Count, Positive, Record, Seconds

Rate = Annotated[float, Field(ge=0)]


class ServingMemoryRecord(Record):
    """One GPU of a stage: what serving needs of its memory, line by line."""

    weights_bytes: Bytes
    cache_bytes: Bytes  # batch_limit sequences of full length
    workspace_bytes: Bytes  # activations of the largest step, logits
    graphs_bytes: Bytes  # captured CUDA graphs
    reserve_bytes: Bytes  # context, communicators, fragmentation
    total_bytes: Bytes
    limit_bytes: Bytes

    @property
    def summed(self) -> int:
        return (
            self.weights_bytes
            + self.cache_bytes
            + self.workspace_bytes
            + self.graphs_bytes
            + self.reserve_bytes
        )


class PhaseRecord(Record):
    """One step of a phase. ``tokens``: in the step. ``parts``: seconds by cause, which
    add up to ``stage_s`` (the slowest stage); ``latency_s``: through all stages.
    ``peak_fraction``: arithmetic over the GPUs' dense peak."""

    name: Literal["prefill", "decode"]
    sequences: Rate
    tokens: Rate
    context: Count
    stage_s: Seconds
    latency_s: Seconds
    parts: dict[str, float]
    flops: Rate
    peak_fraction: Rate
    bound: Literal["compute", "memory", "launch", "links"]


class KernelRecord(Record):
    """A product of the decode step on one GPU."""

    name: str
    m: Positive
    n: Positive
    k: Positive
    experts: Positive = 1
    time_s: Seconds
    peak_fraction: Rate
    bound: Literal["compute", "memory", "launch"]


class OperatingPoint(Record):
    """A layout at one batch. Throughput counts output tokens of all instances over all
    GPUs of the cluster."""

    tp: Positive
    pp: Positive
    ep: Positive = 1
    attention_dp: Positive = 1
    instances: Positive = 1
    prefill_instances: Count = 0
    batch: Positive  # sequences in flight per instance
    ttft_s: Seconds
    tpot_s: Seconds
    tokens_per_s: Rate
    tokens_per_s_per_gpu: Rate
    meets_limits: bool


class QueueRecord(Record):
    """Requests that arrive at random: simulated, and by the closed form."""

    arrival_per_s: Rate
    capacity_per_s: Rate
    utilization: Rate
    requests: Positive
    mean_wait_s: Seconds
    p50_ttft_s: Seconds
    p95_ttft_s: Seconds
    p95_tpot_s: Seconds
    mean_in_flight: Rate
    closed_form_wait_s: Seconds


class ServingRecord(Record):
    """How a model is served. ``prefill_instances`` > 0: the first so many instances
    only prefill, the others only decode. ``windowed_cache``: layers with a sliding
    window keep their window only."""

    engine: str
    weights: str
    group: Positive
    kv: str
    tp: Positive
    pp: Positive
    ep: Positive = 1
    attention_dp: Positive = 1
    instances: Positive
    prefill_instances: Count = 0
    idle_gpus: Count = 0
    batch_limit: Positive
    max_concurrency: Positive
    weight_bytes: Bytes
    kv_bytes_per_token: Bytes
    kv_bytes_per_token_per_gpu: Bytes
    windowed_cache: bool
    sequence_bytes_per_gpu: Bytes
    memory: tuple[ServingMemoryRecord, ...]
    phases: tuple[PhaseRecord, ...]
    kernels: tuple[KernelRecord, ...] = ()
    ttft_s: Seconds
    tpot_s: Seconds
    latency_s: Seconds
    tokens_per_s: Rate
    tokens_per_s_per_gpu: Rate
    requests_per_s: Rate
    cost_per_million_tokens: float | None = None
    binds: str
    curve: tuple[OperatingPoint, ...] = ()
    pareto: tuple[OperatingPoint, ...] = ()
    queue: QueueRecord | None = None
    notes: tuple[str, ...] = ()
