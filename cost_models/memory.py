"""Peak memory of one rank in a training step, by line, at the moment that binds.

Four moments compete (all lines in bytes):

* ``forward_end``: parameters + optimizer states + gradients held so far + the saved
  activations of every micro-batch in flight + the loss on the last stage;
* ``backward``: the same once the loss is gone, with one layer's working set (its
  gradients, or what recompute brings back), gathered parameters and gradient buckets;
* ``backward_end``: all gradients, with the activations of the last layer alone;
* ``optimizer_step``: no activations; all gradients and the optimizer's temporaries.

Left out: allocator rounding below a block (512 B), host memory, and whatever other
processes hold. Numbers only; where they come from is the caller's business.
Sources: Rajbhandari et al. 2020 (ZeRO), Korthikanti et al. 2022, torch's DDP and FSDP
notes, Megatron-LM's distributed optimizer notes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from cost_models.errors import SpecError
from cost_models.units import GIB

MIB: Final = 1 << 20

#: Optimizer states beside a master copy, bytes per parameter. 8-bit Adam: two bytes and
#: a 4-byte scale per block of 256 each. Adafactor keeps a row and a column sum per
#: matrix: 4 (r + c) / (r c), taken at r = c = 4096.
OPTIMIZER_STATE_BYTES: Final = MappingProxyType(
    {
        "adamw": 8.0,
        "adam": 8.0,
        "lion": 4.0,
        "momentum": 4.0,
        "sgd": 0.0,
        "adam8bit": 2.0 + 2 * 4 / 256,
        "adafactor": 8 / 4096,
    }
)

#: What a CUDA context with torch's and cuBLAS's kernels loaded takes on the device, by
#: architecture. About 0.3 GiB on Volta to 0.6 GiB on Blackwell, as nvidia-smi shows
#: for an idle process; never in torch's own statistics.
CONTEXT_BYTES: Final = MappingProxyType(
    {
        "volta": 310 * MIB,
        "turing": 310 * MIB,
        "ampere": 420 * MIB,
        "ada": 420 * MIB,
        "hopper": 530 * MIB,
        "blackwell": 600 * MIB,
        "cdna2": 500 * MIB,
        "cdna3": 500 * MIB,
    }
)

#: cuBLAS workspace that torch allocates per handle and stream (CUBLAS_WORKSPACE_CONFIG
#: of torch: 32 MiB from Hopper on, 8 MiB and 17 KiB before).
CUBLAS_WORKSPACE_BYTES: Final = MappingProxyType(
    {"hopper": 32 * MIB, "blackwell": 32 * MIB}
)
CUBLAS_WORKSPACE_DEFAULT_BYTES: Final = 8 * MIB + 128 * 1024

#: Per communicator: 2 channels x buffers of 4 MiB for send and receive, times the rings
#: that NCCL opens; about this much on NVSwitch machines.
NCCL_COMMUNICATOR_BYTES: Final = 150 * MIB


@dataclass(frozen=True, slots=True)
class PrecisionRecipe:
    """Bytes per parameter element of every state. ``gradient``: what stays until the
    optimizer step; ``flowing_gradient``: what autograd makes before it is added there
    (0: it is the resident one); ``master``: an extra copy that the optimizer owns;
    ``gathered``: an element of a ZeRO-3 unit when gathered for compute."""

    name: str
    parameter: float
    gradient: float
    master: float
    flowing_gradient: float = 0.0
    gathered: float = 2.0


RECIPES: Final = MappingProxyType(
    {
        r.name: r
        for r in (
            # torch.amp-free mixed precision: 2 + 2 + 4 + states (16 B with Adam)
            PrecisionRecipe("bf16", 2, 2, 4),
            PrecisionRecipe("fp16", 2, 2, 4),
            # Megatron, nanotron: gradients add up in FP32 (18 B with Adam)
            PrecisionRecipe("bf16_fp32_gradients", 2, 4, 4, flowing_gradient=2),
            # FP32 states kept, cast op by op (torch.autocast) or not at all
            PrecisionRecipe("fp32", 4, 4, 0, gathered=4),
            PrecisionRecipe("tf32", 4, 4, 0, gathered=4),
            # FSDP mixed precision: FP32 shards, bf16 when gathered (16 B with Adam)
            PrecisionRecipe("fsdp_mixed", 4, 4, 0, flowing_gradient=2),
            # everything in bf16: 2 + 2, and states in bf16 as well (see states_bytes)
            PrecisionRecipe("pure_bf16", 2, 2, 0),
            # quantised compute keeps bf16 parameters, gradients and FP32 masters
            PrecisionRecipe("fp8", 2, 2, 4),
        )
    }
)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Elements that one rank holds before ZeRO divides them over ``shard`` ranks.

    ``storage_bytes``: per element, for frozen ones (trainable: the recipe's).
    """

    elements: float
    shard: int = 1
    trainable: bool = True
    storage_bytes: float = 2.0

    def __post_init__(self) -> None:
        if self.elements < 0 or self.shard < 1 or self.storage_bytes <= 0:
            raise SpecError(
                "a parameter group needs elements >= 0, shard >= 1, storage > 0",
                f"{self.elements}, {self.shard}, {self.storage_bytes}",
            )


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """Numbers of one rank (bytes unless named otherwise).

    ``activation_bytes``: saved by one micro-batch on this rank under the chosen
    recompute mode (all chunks); ``in_flight`` of them are live at the peak.
    ``working_bytes``: most that one layer's backward holds beside what was saved:
    the gradients in flow and what recompute brings back. ``logits_bytes``: peak of the
    loss on the rank that has it (0 elsewhere); ``logits_saved_bytes`` of that stay for
    backward. ``unit_elements``: parameters of the largest ZeRO-3 unit, ``prefetch``
    of which are gathered at once. ``micro_batches``: per step; with more than one,
    gradients are held while later micro-batches run. ``gradients_always``: they live in
    a buffer from the start. ``bucket_view``: DDP gradients are views of its buckets.
    ``optimizer_temporary``: bytes per updated parameter element during the step.
    ``fragmentation``: share of what the allocator holds that no tensor can use.
    """

    device_memory_bytes: float
    groups: tuple[ParameterGroup, ...]
    recipe: PrecisionRecipe = field(default_factory=lambda: RECIPES["bf16"])
    optimizer: str = "adamw"
    states_bytes: float | None = None  # per parameter; None: by optimizer
    offload_optimizer: bool = False  # master copy and states live on the host
    zero: int = 0
    micro_batches: int = 1
    gradients_always: bool = False
    ddp: bool = False
    bucket_view: bool = True
    bucket_bytes: float = 0.0
    unit_elements: float = 0.0
    prefetch: int = 2
    activation_bytes: float = 0.0
    in_flight: float = 1.0
    working_bytes: float = 0.0
    logits_bytes: float = 0.0
    logits_saved_bytes: float = 0.0
    p2p_buffer_bytes: float = 0.0
    buffers_bytes: float = 0.0  # of the model: masks, running statistics, rotary tables
    workspace_bytes: float = 0.0  # beside cuBLAS
    optimizer_temporary: float = 0.0
    arch: str = "ampere"
    communicators: int = 0
    fragmentation: float = 0.0
    limit_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise SpecError("zero must be 0, 1, 2 or 3", self.zero)
        if not 0 <= self.fragmentation < 1:
            raise SpecError("fragmentation is a share below 1", self.fragmentation)
        if self.states_bytes is None and self.optimizer not in OPTIMIZER_STATE_BYTES:
            names = ", ".join(sorted(OPTIMIZER_STATE_BYTES))
            raise SpecError("unknown optimizer", self.optimizer, f"use {names}")


@dataclass(frozen=True, slots=True)
class MemoryLines:
    """Peak of one rank by line; ``total_bytes`` is their sum at ``peak_moment``."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    logits_bytes: float
    gather_buffers_bytes: float
    workspace_bytes: float
    reserved_bytes: float
    total_bytes: float
    limit_bytes: float
    peak_moment: str

    @property
    def allocated_bytes(self) -> float:
        """What torch.cuda.max_memory_allocated() reports: all but ``reserved``."""
        return self.total_bytes - self.reserved_bytes

    @property
    def over_bytes(self) -> float:
        """Bytes missing; negative: bytes free."""
        return self.total_bytes - self.limit_bytes


@dataclass(frozen=True, slots=True)
class _States:
    parameters: float
    gradients: float  # resident once a backward has run
    flowing: float  # gradients of the whole rank before they are reduced
    optimizer: float
    updated: float  # elements that this rank's optimizer step touches
    trainable: float


def _states(x: MemoryInputs) -> _States:
    """Parameter states of the rank as ZeRO divides them."""
    r = x.recipe
    per_state = OPTIMIZER_STATE_BYTES.get(x.optimizer, 0.0)
    if x.states_bytes is not None:
        per_state = x.states_bytes
    parameters = gradients = optimizer = updated = trainable = 0.0
    for g in x.groups:
        stored = g.elements / (g.shard if x.zero >= 3 else 1)
        if not g.trainable:
            parameters += stored * g.storage_bytes
            continue
        parameters += stored * r.parameter
        gradients += g.elements / (g.shard if x.zero >= 2 else 1) * r.gradient
        own = g.elements / (g.shard if x.zero >= 1 else 1)
        if not x.offload_optimizer:
            optimizer += own * (r.master + per_state)
        updated += own
        trainable += g.elements
    flowing = trainable * r.flowing_gradient
    return _States(parameters, gradients, flowing, optimizer, updated, trainable)


def training_memory(x: MemoryInputs) -> MemoryLines:
    """Peak over the moments of a step; see the module's docstring."""
    s = _states(x)
    lower, upper = _gathers(x), _bucket(x, s)
    saved = x.activation_bytes * x.in_flight + x.p2p_buffer_bytes + x.buffers_bytes
    held = s.gradients if (x.gradients_always or x.micro_batches > 1) else 0.0
    temporary = x.optimizer_temporary * s.updated
    copies = upper if x.ddp and not x.bucket_view else 0.0
    # (gradients, activations, loss, gathers and buckets, the optimizer's workspace)
    moments = {
        "forward_end": (held, saved, x.logits_bytes, lower, 0.0),
        "backward": (
            held,
            saved + x.working_bytes,
            x.logits_saved_bytes,
            lower + (upper if held else 0.0),
            0.0,
        ),
        # all gradients are there by now, and the activations of one layer
        "backward_end": (
            s.gradients,
            x.working_bytes + x.buffers_bytes,
            0.0,
            lower + upper,
            0.0,
        ),
        "optimizer_step": (s.gradients, x.buffers_bytes, 0.0, copies, temporary),
    }
    moment = max(moments, key=lambda name: sum(moments[name]))
    gradients, activations, logits, gathers, stepping = moments[moment]
    cublas = CUBLAS_WORKSPACE_BYTES.get(x.arch, CUBLAS_WORKSPACE_DEFAULT_BYTES)
    workspace = cublas + x.workspace_bytes + stepping
    lines = (s.parameters, gradients, s.optimizer, activations, logits, gathers)
    allocated = sum(lines) + workspace
    reserved = (
        allocated * x.fragmentation / (1 - x.fragmentation)
        + CONTEXT_BYTES.get(x.arch, 500 * MIB)
        + x.communicators * NCCL_COMMUNICATOR_BYTES
    )
    limit = x.device_memory_bytes if x.limit_bytes is None else x.limit_bytes
    return MemoryLines(
        *lines, workspace, reserved, allocated + reserved, limit, peak_moment=moment
    )


def _gathers(x: MemoryInputs) -> float:
    """ZeRO-3 units that are gathered at once."""
    if x.zero < 3:
        return 0.0
    return x.unit_elements * x.recipe.gathered * x.prefetch


def _bucket(x: MemoryInputs, s: _States) -> float:
    """Gradients beside the resident ones: DDP's second copy, or what flows.

    DDP without ``gradient_as_bucket_view`` copies every gradient. ZeRO-2 and 3 hold the
    unreduced gradients of one unit, FP32 accumulation those of one layer.
    """
    if x.ddp and not x.bucket_view:
        return s.trainable * x.recipe.gradient
    if x.zero >= 2:
        flowing = x.recipe.flowing_gradient or x.recipe.gradient
        return max(x.bucket_bytes, x.unit_elements * flowing)
    return x.bucket_bytes


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Bytes of one micro-batch on one rank: kept for backward, and brought back."""

    saved_bytes: float
    working_bytes: float


def recomputed(
    layers: float,
    layer_saved_bytes: float,
    layer_input_bytes: float,
    mode: str = "none",
    selective_saved_bytes: float | None = None,
    recomputed_layers: float | None = None,
) -> SavedActivations:
    """What ``layers`` equal layers keep under a recompute mode.

    ``full``: ``recomputed_layers`` of them (None: all) keep their input alone and
    bring one layer's ``layer_saved_bytes`` back at a time. ``selective``: each keeps
    ``selective_saved_bytes`` and brings back the difference. Raises SpecError.
    """
    if mode == "none":
        return SavedActivations(layers * layer_saved_bytes, 0.0)
    if mode == "selective":
        if selective_saved_bytes is None:
            raise SpecError("selective recompute needs selective_saved_bytes")
        back = layer_saved_bytes - selective_saved_bytes
        return SavedActivations(layers * selective_saved_bytes, back)
    if mode != "full":
        raise SpecError("unknown recompute mode", mode, "use none, selective or full")
    again = layers if recomputed_layers is None else min(recomputed_layers, layers)
    saved = again * layer_input_bytes + (layers - again) * layer_saved_bytes
    return SavedActivations(saved, layer_saved_bytes if again else 0.0)


@dataclass(frozen=True, slots=True)
class LossBytes:
    """Bytes of logits and loss: at their peak, and kept for backward."""

    peak_bytes: float
    saved_bytes: float


#: Bytes per logit (peak, saved). ``eager``: half-precision logits, an FP32 copy and its
#: FP32 log-softmax (2 + 4 + 4), of which logits and log-softmax stay. Megatron's
#: ``vocab_parallel``: half-precision logits, an FP32 copy that becomes the softmax in
#: place, its half-precision gradient. ``fused``: the gradient overwrites the logits.
LOSS_BYTES_PER_LOGIT: Final = MappingProxyType(
    {
        "eager": (10.0, 6.0),
        "fp32": (8.0, 4.0),
        "vocab_parallel": (8.0, 4.0),
        "fused": (2.0, 2.0),
        "chunked": (0.0, 0.0),
    }
)


def loss_bytes(
    tokens: float, vocab: float, kind: str = "eager", tp: int = 1
) -> LossBytes:
    """Logits and loss of ``tokens`` x ``vocab`` over ``tp`` vocabulary shards."""
    if kind not in LOSS_BYTES_PER_LOGIT:
        names = ", ".join(LOSS_BYTES_PER_LOGIT)
        raise SpecError("unknown loss kind", kind, f"use {names}")
    peak, saved = LOSS_BYTES_PER_LOGIT[kind]
    logits = tokens * vocab / tp
    return LossBytes(logits * peak, logits * saved)


def shortage(lines: MemoryLines) -> str:
    """One line: how much is missing (or free) and the largest line."""
    named = {
        name.removesuffix("_bytes"): getattr(lines, name)
        for name in MemoryLines.__dataclass_fields__
        if name.endswith("_bytes") and name not in ("total_bytes", "limit_bytes")
    }
    largest = max(named, key=lambda name: named[name])
    over = lines.over_bytes / GIB
    word = f"{over:.2f} GiB missing" if over > 0 else f"{-over:.2f} GiB free"
    return (
        f"{lines.total_bytes / GIB:.2f} of {lines.limit_bytes / GIB:.2f} GiB at "
        f"{lines.peak_moment}: {word}; most is {largest}, "
        f"{named[largest] / GIB:.2f} GiB"
    )
