"""Software stacks: a few named physical constants per framework, never hidden.

A profile says what the software adds to or hides from the device's time: the host's
launch cost per op, whether pointwise chains are fused, whether whole steps are captured
in CUDA graphs, which attention kernel runs, and how much of each kind of communication
runs under compute. The user or the measured row chooses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from cost_models.errors import SpecError


@dataclass(frozen=True, slots=True)
class StackProfile:
    """Constants of one software stack; fractions in 0..1, seconds, bytes.

    launch_s: host time of one op (dispatch, Python, cudaLaunchKernel); it shows only
    where the device is faster than the host. fused_pointwise: chains run as one kernel.
    cuda_graphs: no host time at all in the captured part. attention_kernel: flash,
    efficient or math. tp_overlap, dp_overlap, cp_overlap, pp_overlap, ep_overlap:
    fraction of that communication that may hide under compute. overlap_slowdown:
    compute seconds lost per hidden second of communication (shared SMs and HBM).
    fragmentation: fraction of allocated memory lost in the allocator. reserved_bytes:
    CUDA context, libraries and communicators. step_host_s: host time per step outside
    the graph of ops (data loader, optimizer bookkeeping, scheduler of a server).
    matrix_rate, attention_rate, memory_rate: rate that GEMMs, fused attention and
    memory-bound kernels reach inside this stack, over what the kernel models (fitted
    on micro-benchmarks) say. optimizer_rate: the same for the parameter update.
    selective_share: part of a block's forward that selective recompute repeats (0: the
    attention core alone). stage_host_s: host time per micro-batch and stage of a
    pipeline (schedule and handshakes). collective_host_s: host time to issue one
    collective inside a block; staged_collective_host_s: what each rank of its group
    adds where the model is also cut into pipeline stages over several nodes, whose
    hosts then wait for each other. expert_rate: like matrix_rate, of grouped products;
    expert_host_s: host time per layer of experts and pass (routing decisions that the
    host waits for). hopper_attention_rate: attention_rate on Hopper and later (0: the
    same), where kernels written for Ampere do not use the new units. tp_rate, dp_rate,
    ep_rate: bandwidth of collectives on that axis inside training, over what a
    collectives benchmark reaches alone (dp_gather_rate: of the parameters that ZeRO
    gathers; 0: as dp_rate). accumulate_bytes: HBM traffic per parameter
    and micro-batch to add gradients to the accumulated ones, beside the GEMM's own
    output. channels_last: memory order of images.
    dp_bucket_bytes: message in which gradients (and ZeRO's parameters) travel over the
    data axes (0: all at once). cast_passes: passes over 8-bit operands to scale and
    cast them (0: fused).
    """

    name: str
    launch_s: float
    fused_pointwise: bool
    cuda_graphs: bool
    attention_kernel: str
    tp_overlap: float
    dp_overlap: float
    cp_overlap: float
    pp_overlap: float
    ep_overlap: float
    overlap_slowdown: float
    fragmentation: float
    reserved_bytes: float
    step_host_s: float
    description: str
    matrix_rate: float = 1.0
    attention_rate: float = 1.0
    memory_rate: float = 1.0
    optimizer_rate: float = 1.0
    selective_share: float = 0.0
    stage_host_s: float = 0.0
    expert_host_s: float = 0.0
    collective_host_s: float = 0.0
    staged_collective_host_s: float = 0.0
    expert_rate: float = 1.0
    hopper_attention_rate: float = 0.0
    tp_rate: float = 1.0
    dp_rate: float = 1.0
    ep_rate: float = 1.0
    dp_gather_rate: float = 0.0
    accumulate_bytes: float = 0.0
    cast_passes: float = 0.0
    channels_last: bool = True
    dp_bucket_bytes: float = 0.0

    def __post_init__(self) -> None:
        fractions = (
            self.tp_overlap,
            self.dp_overlap,
            self.cp_overlap,
            self.pp_overlap,
            self.ep_overlap,
            self.fragmentation,
        )
        if min(fractions) < 0 or max(fractions) > 1:
            raise SpecError("a stack's fractions are in 0..1", self.name)
        costs = (
            self.launch_s,
            self.step_host_s,
            self.stage_host_s,
            self.expert_host_s,
            self.collective_host_s,
            self.staged_collective_host_s,
            self.accumulate_bytes,
            self.cast_passes,
            self.dp_bucket_bytes,
            self.reserved_bytes,
        )
        if min(costs) < 0:
            raise SpecError("a stack's costs are >= 0", self.name)
        rates = (
            self.matrix_rate,
            self.attention_rate,
            self.memory_rate,
            self.optimizer_rate,
            self.expert_rate,
            self.tp_rate,
            self.dp_rate,
            self.ep_rate,
        )
        if min(rates) <= 0:
            raise SpecError("a stack's rates are above 0", self.name)
        if self.attention_kernel not in ("flash", "efficient", "math"):
            raise SpecError("unknown attention kernel", self.attention_kernel)


def _training(
    name: str,
    description: str,
    *,
    launch_us: float,
    fused: bool,
    tp: float = 0.0,
    dp: float = 0.9,
    cp: float = 0.7,
    pp: float = 0.0,
    fragmentation: float = 0.04,
    attention: str = "flash",
) -> StackProfile:
    return StackProfile(
        name=name,
        launch_s=launch_us * 1e-6,
        fused_pointwise=fused,
        cuda_graphs=False,
        attention_kernel=attention,
        tp_overlap=tp,
        dp_overlap=dp,
        cp_overlap=cp,
        pp_overlap=pp,
        ep_overlap=0.0,
        overlap_slowdown=0.15,
        fragmentation=fragmentation,
        reserved_bytes=1.2e9,
        step_host_s=2e-3,
        description=description,
    )


def _serving(
    name: str,
    description: str,
    *,
    launch_us: float,
    fused: bool = True,
    graphs: bool = True,
    host_ms: float = 0.5,
    tp: float = 0.0,
) -> StackProfile:
    return StackProfile(
        name=name,
        launch_s=launch_us * 1e-6,
        fused_pointwise=fused,
        cuda_graphs=graphs,
        attention_kernel="flash",
        tp_overlap=tp,
        dp_overlap=0.0,
        cp_overlap=0.0,
        pp_overlap=0.0,
        ep_overlap=0.0,
        overlap_slowdown=0.0,
        fragmentation=0.02,
        reserved_bytes=1.5e9,
        step_host_s=host_ms * 1e-3,
        description=description,
    )


# Launch costs: eager PyTorch dispatches an op in 5-10 us of host time, a compiled graph
# in about half of that, a C++ engine in 3-4 us; CUDA graphs take about 1 us per kernel.
_PROFILES = (
    _training(
        "eager",
        "PyTorch eager with DDP or DTensor",
        launch_us=8.0,
        fused=False,
        dp=0.85,
    ),
    _training(
        "compiled", "torch.compile: pointwise chains fused", launch_us=4.0, fused=True
    ),
    _training(
        "megatron",
        "Megatron-LM / Transformer Engine: hand-fused kernels, bucketed overlap",
        launch_us=6.0,
        fused=True,
        tp=0.2,
    ),
    _training(
        "fsdp",
        "FSDP as in Composer and torchtitan: prefetched gathers, compiled blocks",
        launch_us=5.0,
        fused=True,
        fragmentation=0.06,
    ),
    _training(
        "nanotron",
        "nanotron: eager with flash attention, ZeRO-1 without overlap of gathers",
        launch_us=8.0,
        fused=False,
        dp=0.6,
    ),
    _training(
        "nemo",
        "NeMo on Megatron Core: TP overlapped with GEMMs in user buffers",
        launch_us=5.0,
        fused=True,
        tp=0.5,
        pp=0.5,
    ),
    _training(
        "megatron-2020",
        "Megatron-LM of 2020: unfused attention, gradients summed after backward",
        launch_us=8.0,
        fused=True,
        dp=0.0,
        attention="math",
    ),
    _training(
        "megatron-2021",
        "Megatron-LM of 2021-22: fused softmax and bias kernels, no DP overlap",
        launch_us=6.0,
        fused=True,
        dp=0.0,
        attention="math",
    ),
    _training(
        "megatron-deepspeed",
        "Megatron-DeepSpeed: the kernels of Megatron-LM 2021, DeepSpeed's pipeline",
        launch_us=8.0,
        fused=True,
        dp=0.0,
        attention="math",
    ),
    _training(
        "megatron-bridge",
        "Megatron-Bridge and NeMo on Megatron Core: TP and DP overlapped, FP8",
        launch_us=4.0,
        fused=True,
        tp=0.5,
        pp=0.5,
    ),
    _training(
        "nemo-mlperf",
        "NeMo as tuned for MLPerf: CUDA graphs, overlapped TP, short sequences packed",
        launch_us=2.0,
        fused=True,
        tp=0.7,
        pp=0.5,
    ),
    _training(
        "megatron-exposed",
        "Megatron Core with its overlaps switched off",
        launch_us=5.0,
        fused=True,
        dp=0.0,
    ),
    _training(
        "llm-foundry",
        "Composer and llm-foundry: FSDP, flash attention in Triton, eager blocks",
        launch_us=6.0,
        fused=False,
    ),
    _training(
        "torchtitan", "torchtitan: FSDP2, compiled blocks", launch_us=4.0, fused=True
    ),
    _training(
        "torchtitan-async-tp",
        "torchtitan with TP collectives split into the matrix products",
        launch_us=4.0,
        fused=True,
        tp=0.6,
    ),
    _training(
        "torchtitan-rowwise",
        "torchtitan with FP8 scales per row: slower products and casts",
        launch_us=4.0,
        fused=True,
    ),
    _training(
        "megatron-deterministic",
        "Megatron Core in deterministic mode: slow attention backward, no fusions",
        launch_us=5.0,
        fused=False,
    ),
    _training(
        "torchtitan-eager", "torchtitan without compile", launch_us=8.0, fused=False
    ),
    _training(
        "internevo",
        "InternEvo: flash attention, ZeRO-1 inside the node, overlapped gradients",
        launch_us=6.0,
        fused=False,
    ),
    _training(
        "bert-dle",
        "NVIDIA DeepLearningExamples BERT: apex kernels, unfused attention",
        launch_us=6.0,
        fused=True,
        attention="math",
    ),
    _training(
        "vision-eager",
        "convolutional models in eager PyTorch",
        launch_us=8.0,
        fused=False,
    ),
    _training(
        "vision-compiled",
        "convolutional models under torch.compile",
        launch_us=4.0,
        fused=True,
    ),
    _training(
        "vision-dle",
        "NVIDIA DeepLearningExamples: apex DDP, DALI input, eager",
        launch_us=8.0,
        fused=False,
    ),
    _serving("trtllm", "TensorRT-LLM engine", launch_us=1.0, host_ms=0.3),
    _serving("vllm", "vLLM with CUDA graphs in decode", launch_us=1.0, host_ms=1.5),
    _serving("sglang", "SGLang with an overlapped scheduler", launch_us=1.0),
    _serving(
        "fastertransformer",
        "FasterTransformer C++ kernels, no CUDA graphs",
        launch_us=3.0,
        graphs=False,
        host_ms=0.1,
    ),
    _serving("lmdeploy", "LMDeploy TurboMind C++ engine", launch_us=3.0, graphs=False),
    _serving("gptfast", "gpt-fast: compiled decode in CUDA graphs", launch_us=1.0),
)


def _fitted() -> dict[str, dict[str, dict[str, Any]]]:
    """Constants that ``benchmarks/fit/fit_stacks.py`` wrote: by stack (or GPU and
    dtype, under "sustained") and field, each with value, error and source."""
    text = files("cost_models").joinpath("specs/stacks.json").read_text("utf-8")
    return json.loads(text)


def _with_fit(profile: StackProfile, fitted: dict[str, dict[str, Any]]) -> StackProfile:
    values = {name: float(entry["value"]) for name, entry in fitted.items()}
    return replace(profile, **values) if values else profile


_FITTED = _fitted()
_BY_NAME = {p.name: _with_fit(p, _FITTED.get(p.name, {})) for p in _PROFILES}
assert len(_BY_NAME) == len(_PROFILES)


def sustained_rate(name: str, family: str, dtype: str) -> float:
    """Matrix rate of a GPU under hours of full load over the bursts of seconds that
    kernel benchmarks time: power limits lower the clock. The GPU's own figure, else
    its family's; 1.0 where nothing is known."""
    return sustained_of(
        {key: float(entry["value"]) for key, entry in _FITTED["sustained"].items()},
        name,
        family,
        dtype,
    )


def sustained_of(
    known: Mapping[str, float], name: str, family: str, dtype: str
) -> float:
    """:func:`sustained_rate` among given figures, keyed ``GPU/dtype``."""
    own = known.get(f"{name}/{dtype}")
    return own if own is not None else known.get(f"{family}/{dtype}", 1.0)


def stack_names() -> tuple[str, ...]:
    """The known stacks."""
    return tuple(_BY_NAME)


def load_stack(name: str) -> StackProfile:
    """A stack by name; raises SpecError with the known names."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise SpecError(
            "unknown software stack", name, f"Use one of {', '.join(_BY_NAME)}"
        ) from None
