"""What is to be run: the user's training or inference job, and a way to split it.

The global batch and the numerics belong to the user; the planner never changes them.
Every class checks itself on construction and raises :class:`PlannerError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from planner.errors import PlannerError

if TYPE_CHECKING:
    from cost_models.hardware import ClusterSpec, DeviceSpec

Precision: TypeAlias = Literal["bf16", "fp16", "fp32", "tf32", "fp8"]
Im2col: TypeAlias = Literal["implicit", "materialized"]
OptimizerName: TypeAlias = Literal["adamw", "adam", "sgd", "momentum", "lion"]
WeightFormat: TypeAlias = Literal["bf16", "fp16", "fp32", "fp8", "int8", "int4", "fp4"]
CacheFormat: TypeAlias = Literal["bf16", "fp16", "fp32", "fp8", "int8"]
GradientFormat: TypeAlias = Literal["bf16", "fp16", "fp32"]
ServingObjective: TypeAlias = Literal["latency", "throughput", "gpus", "cost"]
RecomputeMode: TypeAlias = Literal["none", "selective", "full"]
ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
PinValue: TypeAlias = int | bool | str

#: FP32 values that the optimizer keeps per parameter beside a master copy.
OPTIMIZER_STATES: dict[str, int] = {
    "adamw": 2,
    "adam": 2,
    "momentum": 1,
    "lion": 1,
    "sgd": 0,
}

#: Samples per GPU where the user gives no global batch.
DEFAULT_SAMPLES_PER_GPU = 8

_FORBID_EXTRA = {"extra": "forbid"}


def _one_of(what: str, value: object, allowed: Iterable[str]) -> None:
    names = sorted(allowed)
    if value not in names:
        near = difflib.get_close_matches(str(value), names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise PlannerError(f"unknown {what}", value, f"{hint}use {', '.join(names)}")


def _whole(what: str, value: object, least: int = 1, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlannerError(f"{what} must be a whole number", repr(value))
    if value < least:
        raise PlannerError(f"{what} must be at least {least}", value)


def _positive(what: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise PlannerError(f"{what} must be greater than 0", value)


@dataclass(frozen=True, slots=True)
class Training:
    """Forward, backward and optimizer step of ``global_batch`` samples.

    ``precision``: numerics of the matrix ops; bf16, fp16 and fp8 train with FP32
    master weights and optimizer states (mixed precision). ``gradient_dtype``: what
    gradients accumulate in; None leaves it to the stack. ``compile``: pointwise chains
    run as one kernel. ``stack``: software profile by name; None follows ``compile``.
    ``seq_len`` and ``image_size`` override the model's own. ``memory_limit_bytes``:
    per GPU; None is what the device has. Dropout and frozen parameters stay as traced.
    ``im2col="materialized"``: convolutions run as patches written to memory and a
    product, instead of one kernel that never writes them.
    """

    global_batch: int | None = None
    seq_len: int | None = None
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    gradient_dtype: GradientFormat | None = None
    compile: bool = True
    stack: str | None = None
    image_size: int | None = None
    memory_limit_bytes: int | None = None
    im2col: Im2col = "implicit"
    kind: Literal["training"] = "training"

    __pydantic_config__ = _FORBID_EXTRA

    def __post_init__(self) -> None:
        _whole("global batch", self.global_batch, optional=True)
        _whole("sequence length", self.seq_len, optional=True)
        _whole("image size", self.image_size, optional=True)
        _whole("memory limit in bytes", self.memory_limit_bytes, optional=True)
        _one_of("precision", self.precision, get_args(Precision))
        _one_of("optimizer", self.optimizer, get_args(OptimizerName))
        if self.gradient_dtype is not None:
            _one_of("gradient dtype", self.gradient_dtype, get_args(GradientFormat))
        _one_of("im2col", self.im2col, get_args(Im2col))
        _one_of("workload kind", self.kind, ("training",))

    @property
    def stack_name(self) -> str:
        """Name of the software profile that prices this job."""
        return self.stack or ("compiled" if self.compile else "eager")


@dataclass(frozen=True, slots=True)
class Inference:
    """Prefill of ``prompt_len`` tokens, then ``output_len`` decode steps.

    ``weights`` and ``kv``: storage formats; ``group``: weights that share a scale in
    int4; ``eight_bit_math``: fp8 and int8 weights with 8-bit activations where the GPU
    computes in them (False: weights alone are small). ``ttft_limit_s`` bounds the time
    to the first token and ``tpot_limit_s`` the time per output token;
    ``arrival_per_s`` is the request rate to serve; ``batch`` fixes the requests in
    flight (None: chosen).
    ``objective``: lowest latency of a request, most tokens per second and GPU within
    the limits, fewest GPUs, or least cost of a token.
    """

    prompt_len: int = 1024
    output_len: int = 128
    weights: WeightFormat = "bf16"
    kv: CacheFormat = "bf16"
    group: int = 128
    eight_bit_math: bool = True
    precision: Precision = "bf16"
    batch: int | None = None
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None
    arrival_per_s: float | None = None
    objective: ServingObjective = "latency"
    compile: bool = True
    stack: str | None = None
    memory_limit_bytes: int | None = None
    kind: Literal["inference"] = "inference"

    __pydantic_config__ = _FORBID_EXTRA

    def __post_init__(self) -> None:
        _whole("prompt length", self.prompt_len)
        _whole("output length", self.output_len)
        _whole("batch", self.batch, optional=True)
        _whole("quantisation group", self.group)
        _whole("memory limit in bytes", self.memory_limit_bytes, optional=True)
        _one_of("weight format", self.weights, get_args(WeightFormat))
        _one_of("KV cache format", self.kv, get_args(CacheFormat))
        _one_of("precision", self.precision, get_args(Precision))
        _one_of("objective", self.objective, get_args(ServingObjective))
        _positive("time-to-first-token limit", self.ttft_limit_s)
        _positive("time-per-output-token limit", self.tpot_limit_s)
        _positive("arrival rate", self.arrival_per_s)
        _one_of("workload kind", self.kind, ("inference",))

    @property
    def stack_name(self) -> str:
        """Name of the software profile that prices this job."""
        return self.stack or ("compiled" if self.compile else "eager")


Workload: TypeAlias = Training | Inference


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one job is divided. Mesh axes outer to inner: pp, dp_replicate, dp_shard,
    cp, tp; ``ep`` reuses ranks of dp_shard x cp x tp.

    ``zero``: level that ``dp_shard`` divides (1 optimizer, 2 + gradients, 3 +
    parameters; 0 none). ``vpp``: model chunks per rank. ``recompute``: one mode for
    every layer, or per stage the number of layers recomputed in full, the first ones.
    ``layers_per_stage``: repeated layers on each stage (None: as even as possible).
    ``num_micro_batches`` follows from the global batch (:meth:`derive`).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    vpp: int = 1
    sequence_parallel: bool = True
    zero: int = 0
    micro_batch_size: int = 1
    num_micro_batches: int | None = None
    schedule: ScheduleName = "1f1b"
    recompute: RecomputeMode | tuple[int, ...] = "none"
    layers_per_stage: tuple[int, ...] | None = None

    __pydantic_config__ = _FORBID_EXTRA

    def __post_init__(self) -> None:
        for name in (*DEGREES, "vpp", "micro_batch_size"):
            _whole(name, getattr(self, name))
        _whole("num_micro_batches", self.num_micro_batches, optional=True)
        _whole("zero", self.zero, least=0)
        if self.zero > 3:
            raise PlannerError("zero must be 0, 1, 2 or 3", self.zero)
        _one_of("schedule", self.schedule, get_args(ScheduleName))
        self._normalise()
        self._check_stages()
        if (self.dp_shard * self.cp * self.tp) % self.ep:
            raise PlannerError(
                "ep must divide dp_shard x cp x tp, whose ranks it reuses",
                f"ep={self.ep} of {self.dp_shard} x {self.cp} x {self.tp}",
                "raise dp_shard or lower ep",
            )
        if self.zero and self.dp_shard == 1 and self.dp_replicate > 1:
            raise PlannerError(
                "ZeRO divides over dp_shard, which is 1",
                f"zero={self.zero}, dp_replicate={self.dp_replicate}",
                f"use dp_shard={self.dp_replicate} in place of dp_replicate",
            )

    def _normalise(self) -> None:
        """Fields that follow from others: no tp, no sequence parallelism; several
        chunks per rank are interleaved."""
        if self.tp == 1:
            object.__setattr__(self, "sequence_parallel", False)
        if self.vpp > 1 and self.schedule == "1f1b":
            object.__setattr__(self, "schedule", "interleaved")
        for name in ("recompute", "layers_per_stage"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))  # pyright: ignore[reportUnknownArgumentType]

    def _check_stages(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise PlannerError("vpp needs pp > 1", f"vpp={self.vpp}, pp=1")
        v_shaped = self.schedule == "zero_bubble" and self.vpp == 2
        if self.vpp > 1 and self.schedule != "interleaved" and not v_shaped:
            raise PlannerError(
                "vpp > 1 runs the interleaved schedule (zero_bubble takes 2 chunks)",
                f"{self.schedule}, vpp={self.vpp}",
                "use schedule=interleaved or vpp=1",
            )
        if isinstance(self.recompute, tuple):
            self._per_stage("recompute", self.recompute, least=0)
        else:
            _one_of("recompute mode", self.recompute, get_args(RecomputeMode))
        if self.layers_per_stage is not None:
            self._per_stage("layers_per_stage", self.layers_per_stage, least=0)

    def _per_stage(self, what: str, counts: tuple[int, ...], least: int) -> None:
        if len(counts) != self.pp:
            raise PlannerError(
                f"{what} needs one count per stage",
                f"{len(counts)} counts for pp={self.pp}",
            )
        for count in counts:
            _whole(f"{what} of a stage", count, least)

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_gpus(self) -> int:
        """Ranks of the whole mesh."""
        return self.pp * self.data_parallel * self.cp * self.tp

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes outer to inner with their sizes (``ep`` is not an axis)."""
        return tuple((name, getattr(self, name)) for name in MESH_AXES)

    def check_cluster(self, num_gpus: int) -> None:
        """Raises unless the mesh has exactly the cluster's GPUs."""
        if self.num_gpus != num_gpus:
            shape = " x ".join(f"{name} {size}" for name, size in self.axes)
            raise PlannerError(
                "the mesh does not have the cluster's GPUs",
                f"{shape} = {self.num_gpus}, the cluster has {num_gpus}",
                "change a degree so that the product matches",
            )

    def derive(self, global_batch: int) -> Parallelism:
        """With ``num_micro_batches`` = global batch / (dp x micro-batch size).

        Raises PlannerError, naming the nearest legal batches, if it is not whole, or
        if the interleaved schedule can not divide the micro-batches over the stages.
        """
        count = micro_batches(global_batch, self.data_parallel, self.micro_batch_size)
        if self.schedule == "interleaved" and count % self.pp:
            step = self.data_parallel * self.micro_batch_size * self.pp
            raise PlannerError(
                "the interleaved schedule needs micro-batches in multiples of pp",
                f"{count} micro-batches on pp={self.pp}",
                f"use a global batch of {nearest(global_batch, step)}, or vpp=1",
            )
        return replace(self, num_micro_batches=count)

    def label(self) -> str:
        """Short text such as ``tp 8 x pp 4 x dp 2, zero 1, micro-batch 1``."""
        degrees = [
            f"{name} {getattr(self, attr)}"
            for name, attr in (("tp", "tp"), ("pp", "pp"), ("cp", "cp"), ("ep", "ep"))
            if getattr(self, attr) > 1
        ]
        if self.data_parallel > 1 or not degrees:
            shown = f"dp {self.data_parallel}"
            if self.dp_replicate > 1 and self.dp_shard > 1:
                shown += f" ({self.dp_replicate} replicas of {self.dp_shard} shards)"
            degrees.append(shown)
        extra = [f"zero {self.zero}"] if self.zero else []
        extra += [f"{self.vpp} chunks a rank"] if self.vpp > 1 else []
        extra.append(f"micro-batch {self.micro_batch_size}")
        return ", ".join([" x ".join(degrees), *extra])


MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")


def nearest(value: int, step: int) -> str:
    """The multiples of ``step`` around ``value``, as text: ``"48 or 56"``."""
    below, above = value // step * step, -(-value // step) * step
    found = sorted({n for n in (below, above) if n > 0})
    return " or ".join(map(str, found))


def micro_batches(global_batch: int, data_parallel: int, micro_batch_size: int) -> int:
    """Micro-batches of a step; raises PlannerError naming the nearest legal batches."""
    step = data_parallel * micro_batch_size
    if global_batch % step:
        raise PlannerError(
            "the global batch is not divisible by data parallelism x micro-batch size",
            f"{global_batch} over {data_parallel} x {micro_batch_size} = {step}",
            f"use a global batch of {nearest(global_batch, step)}",
        )
    return global_batch // step


def check_batch(
    global_batch: int, num_gpus: int, pins: Mapping[str, PinValue] | None = None
) -> None:
    """Raises unless some data-parallel degree above 1 divides batch and GPUs.

    A batch of 1, and a job pinned to run without data parallelism (for instance
    ``pp=7`` on 7 GPUs), are taken as meant.
    """
    pinned = {k: int(v) for k, v in (pins or {}).items() if k in DEGREES}
    dp = pinned.get("dp_replicate", 1) * pinned.get("dp_shard", 1)
    if dp > 1:
        micro = int((pins or {}).get("micro_batch_size", 1))
        micro_batches(global_batch, dp, micro)
        return
    model_parallel = (
        pinned.get("pp", 1) * pinned.get("tp", 1) * pinned.get("cp", 1) == num_gpus
    )
    if num_gpus == 1 or global_batch == 1 or model_parallel:
        return
    if gcd(global_batch, num_gpus) == 1:
        raise PlannerError(
            f"a global batch of {global_batch} can not be divided over {num_gpus} GPUs",
            "no data-parallel degree above 1 divides both",
            f"use a global batch of {nearest(global_batch, num_gpus)}, another number "
            f"of GPUs, or pin pp={num_gpus} to run without data parallelism",
        )


_FALLBACK: dict[str, tuple[str, ...]] = {
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32",),
    "fp8": ("bf16", "fp16"),
    "fp32": (),
}


def check_supported(workload: Workload, device: DeviceSpec) -> None:
    """Raises PlannerError where the device has no units for the job's precision."""
    if device.supports(workload.precision):
        return
    options = [p for p in _FALLBACK[workload.precision] if device.supports(p)]
    fix = f"use precision {options[0]}" if options else "choose another GPU"
    raise PlannerError(
        f"{device.name} has no {workload.precision} matrix units",
        f"precision {workload.precision}",
        fix,
    )


def check_cluster_supports(workload: Workload, cluster: ClusterSpec) -> None:
    """:func:`check_supported` for every kind of device in the cluster."""
    for group in cluster.groups:
        check_supported(workload, group.device)


def default_global_batch(num_gpus: int) -> int:
    """Samples per step where the user names none."""
    return DEFAULT_SAMPLES_PER_GPU * num_gpus


_PIN_NAMES = {f.name: f for f in fields(Parallelism)}
_PIN_ALIASES = {"micro_batch": "micro_batch_size", "dp": "dp_replicate"}


def parse_pins(texts: Iterable[str]) -> dict[str, PinValue]:
    """``["tp=8", "zero=1", "embed.weight=R"]`` as a dict; see :func:`check_pins`."""
    pins: dict[str, PinValue] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise PlannerError("a pin is NAME=VALUE", repr(text), "e.g. --pin tp=8")
        key = name.strip().replace("-", "_") if "." not in name else name.strip()
        pins[_PIN_ALIASES.get(key, key)] = _pin_value(value.strip())
    check_pins(pins)
    return pins


def _pin_value(text: str) -> PinValue:
    if text.lower() in ("true", "on", "yes"):
        return True
    if text.lower() in ("false", "off", "no"):
        return False
    return int(text) if text.lstrip("-").isdigit() else text


def check_pins(pins: Mapping[str, PinValue]) -> None:
    """Raises unless every pin names a field of :class:`Parallelism` with a legal value,
    or (a name with a dot) a tensor with a placement."""
    chosen: dict[str, Any] = {}
    for name, value in pins.items():
        if "." in name:
            if not isinstance(value, str):
                raise PlannerError(
                    f"the pin of {name} is not a placement", value, "use R or S(dim)"
                )
            continue
        if name not in _PIN_NAMES:
            near = difflib.get_close_matches(name, _PIN_NAMES, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PlannerError(
                "unknown pin", name, f"{hint}use {', '.join(_PIN_NAMES)}"
            )
        chosen[name] = value
    for name in (*DEGREES, "vpp", "micro_batch_size", "num_micro_batches"):
        if name in chosen:
            _whole(f"pin {name}", chosen[name])
    if "zero" in chosen and chosen["zero"] not in (0, 1, 2, 3):
        raise PlannerError("zero must be 0, 1, 2 or 3", chosen["zero"])
    if "schedule" in chosen:
        _one_of("schedule", chosen["schedule"], get_args(ScheduleName))
    if "recompute" in chosen:
        _one_of("recompute mode", chosen["recompute"], get_args(RecomputeMode))
