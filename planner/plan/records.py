"""The parts of a plan document. All times are seconds, all sizes bytes.

Every record is frozen and refuses unknown fields, NaN and infinity.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from planner.workload import Inference, Parallelism, PinValue, Training

if TYPE_CHECKING:
    from cost_models.hardware import ClusterSpec
    from cost_models.memory import MemoryLines

Seconds: TypeAlias = Annotated[float, Field(ge=0)]
Bytes: TypeAlias = Annotated[int, Field(ge=0)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
WorkloadRecord: TypeAlias = Annotated[Training | Inference, Field(discriminator="kind")]
RecomputeText: TypeAlias = Literal["none", "selective", "full"]


class Record(BaseModel):
    """Base of all parts: immutable, no unknown fields, finite numbers only."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class BlockRecord(Record):
    """One run of ops that a stage takes whole. ``kind``: equal for equal structure."""

    name: str
    kind: Count
    ops: Count
    parameters: Count  # unique elements; a tied tensor counts in the first block


class ModelRecord(Record):
    """The model as traced. ``source``: the text that names it again (``gpt2``, a config
    file ...), or ``object:CLASS`` for a module that the caller handed in.
    ``blocks`` in execution order. ``tied``: tensor name to its other names."""

    name: str
    source: str
    parameters: Count  # elements, tied tensors once
    trainable_parameters: Count
    buffer_bytes: Bytes = 0
    graph_hash: str
    seq_len: Count = 0
    blocks: tuple[BlockRecord, ...]
    tied: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])


class NodeGroupRecord(Record):
    """``nodes`` equal nodes."""

    device: str
    memory_bytes: Bytes
    hbm_bytes_per_s: float
    nodes: Positive
    gpus_per_node: Positive
    link: str
    link_bytes_per_s: float


class ClusterRecord(Record):
    """The cluster. ``definition``: the whole file's content where it came from one."""

    text: str
    num_gpus: Positive
    groups: tuple[NodeGroupRecord, ...]
    network: str
    network_bytes_per_s: float
    network_latency_s: Seconds
    definition: dict[str, JsonValue] | None = None

    @classmethod
    def of(
        cls, cluster: ClusterSpec, definition: dict[str, JsonValue] | None = None
    ) -> ClusterRecord:
        """The record of a parsed cluster."""
        groups = tuple(
            NodeGroupRecord(
                device=g.device.name,
                memory_bytes=g.device.memory_bytes,
                hbm_bytes_per_s=g.device.hbm_bytes_per_s,
                nodes=g.nodes,
                gpus_per_node=g.gpus_per_node,
                link=g.link.name,
                link_bytes_per_s=g.link.bytes_per_s,
            )
            for g in cluster.groups
        )
        return cls(
            text=cluster.text,
            num_gpus=cluster.num_gpus,
            groups=groups,
            network=cluster.network.name,
            network_bytes_per_s=cluster.network.bytes_per_s,
            network_latency_s=cluster.network.latency_s,
            definition=definition,
        )


class AxisRecord(Record):
    name: str
    size: Positive


class MeshRecord(Record):
    """Axes outer to inner. ``ranks``: "row-major", so the rank of mesh coordinates
    (c0, c1, ...) is ((c0 x size1 + c1) x size2 + ...)."""

    axes: tuple[AxisRecord, ...]
    ranks: Literal["row-major"] = "row-major"

    @classmethod
    def of(cls, parallelism: Parallelism) -> MeshRecord:
        """All five axes of ``parallelism``, outer to inner."""
        axes = tuple(AxisRecord(name=n, size=s) for n, s in parallelism.axes)
        return cls(axes=axes)

    def size(self, name: str) -> int:
        """Ranks along an axis; 1 for an axis that the mesh does not have."""
        return next((a.size for a in self.axes if a.name == name), 1)


class MemoryRecord(Record):
    """Peak memory of one rank by line."""

    parameters_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    activations_bytes: Bytes
    logits_bytes: Bytes
    gather_buffers_bytes: Bytes
    workspace_bytes: Bytes
    reserved_bytes: Bytes
    total_bytes: Bytes
    limit_bytes: Bytes
    peak_moment: str = ""  # when in the step

    @classmethod
    def of(cls, lines: MemoryLines) -> MemoryRecord:
        """Whole bytes: lines rounded up, the limit down, the total the lines' sum."""
        values = {name: ceil(getattr(lines, name)) for name in MEMORY_LINES}
        return cls(
            **values,
            total_bytes=sum(values.values()),
            limit_bytes=int(lines.limit_bytes),
            peak_moment=lines.peak_moment,
        )

    def lines(self) -> dict[str, int]:
        """The lines that add up to the total."""
        return {name: getattr(self, name) for name in MEMORY_LINES}


MEMORY_LINES = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "logits_bytes",
    "gather_buffers_bytes",
    "workspace_bytes",
    "reserved_bytes",
)


class StageRecord(Record):
    """One pipeline stage.

    ``blocks``: names in execution order of this stage's chunks; ``chunks``: how many
    blocks each chunk has. Chunk c of stage s runs as virtual stage c x pp + s, the
    zero-bubble schedule's second one as 2 pp - 1 - s. ``forward_s`` and ``backward_s``
    are one micro-batch through all chunks, with its tensor, context and expert
    communication and recompute. ``send_s``: one message to the next stage (the last
    stage's goes back to the first, under the interleaved schedule).
    ``backward_weight_s``: the part of ``backward_s`` that zero-bubble postpones.
    """

    index: Count
    blocks: tuple[str, ...]
    chunks: tuple[Count, ...]
    ops: Count
    ranks: tuple[Count, ...]
    forward_s: Seconds
    backward_s: Seconds
    backward_weight_s: Seconds | None = None
    send_s: Seconds = 0.0
    memory: MemoryRecord


class OperandRecord(Record):
    """A tensor as placed. ``placement``: mesh axis to placement text; axes that are
    not named replicate it. ``shape``: the full shape (of one data-parallel rank's
    micro-batch for activations). ``padded``: the sharded dim is padded to divide."""

    tensor: str
    shape: tuple[Count, ...]
    placement: dict[str, str] = Field(default_factory=dict[str, str])
    padded: bool = False


class PlacementRecord(Record):
    """Placement of the tensor or op that the key names.

    A key with ``*`` stands for the layers that ``layers`` lists (``"0-95"``), and so do
    the tensor names inside. A parameter or buffer has
    one output, itself. ``dtype``: as stored. ``blocks``: the blocks that hold it, with
    the same ``*``; a tied tensor is held by several.
    """

    what: Literal["parameter", "buffer", "op"]
    layers: str | None = None
    target: str = ""  # an op's, e.g. aten.linear.default
    dtype: str = ""  # a tensor's
    trainable: bool = False
    blocks: tuple[str, ...] = ()
    inputs: tuple[OperandRecord, ...] = ()
    outputs: tuple[OperandRecord, ...]


class CollectiveRecord(Record):
    """One collective that every rank of a group issues.

    ``axis``: mesh axis, or "ep" / "dp" for groups that span several (dp: replicas and
    shards). ``bytes``: the full tensor, as the cost model counts it.
    ``count_per_step``: per rank. ``time_s``: one call, alone on the network.
    """

    where: str
    kind: Literal[
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"
    ]
    axis: Literal["pp", "dp_replicate", "dp_shard", "dp", "cp", "ep", "tp"]
    phase: Literal["forward", "backward", "recompute", "step"]
    stage: Count = 0
    group_size: Positive
    bytes: Bytes
    count_per_step: Positive
    time_s: Seconds


class BreakdownRecord(Record):
    """Where the step's seconds go; the parts add up to the step."""

    compute: Seconds
    tp_comm: Seconds = 0.0
    cp_comm: Seconds = 0.0
    ep_comm: Seconds = 0.0
    dp_comm_exposed: Seconds = 0.0
    pp_p2p: Seconds = 0.0
    pp_bubble: Seconds = 0.0
    recompute: Seconds = 0.0
    optimizer: Seconds = 0.0
    launch: Seconds = 0.0

    def parts(self) -> dict[str, float]:
        """Part name to seconds, in document order."""
        return dict(self)


class EstimateRecord(Record):
    """Predicted step. ``after_pipeline_s``: the step's end that no stage time holds
    (exposed gradient reduction and the optimizer); the rest is the schedule's closed
    form of the stage times. MFU counts the model's FLOPs, HFU those that run
    (recompute too), both over GPUs x dense peak of ``peak_dtype``."""

    step_time_s: Annotated[float, Field(gt=0)]
    after_pipeline_s: Seconds = 0.0
    samples_per_s: float
    tokens_per_s_per_gpu: float
    model_flops: float
    hardware_flops: float
    peak_flops_per_s: float
    peak_dtype: str
    mfu: float
    hfu: float
    cost_per_hour: float | None = None  # US dollars for the whole cluster
    breakdown: BreakdownRecord
    memory_per_stage: tuple[MemoryRecord, ...]


class SolverRecord(Record):
    name: str
    version: str
    workers: Positive = 1
    seed: int = 0
    limits: dict[str, float] = Field(
        default_factory=dict[str, float]
    )  # deterministic limits that were set


class CertificateRecord(Record):
    """How far the plan can be from the best of the shapes that were considered.

    ``status`` is "optimal" only where the bound meets the objective. ``enumerated``
    shapes are legal; each was ``pruned`` by its lower bound, ``solved``, or ``cut_off``
    by the limits (its bound then holds ``lower_bound_s`` down). ``constraints``: the
    implicit ones; ``pins``: the user's.
    """

    status: Literal["optimal", "feasible"]
    objective: Literal["step_time", "cost", "gpus", "latency", "throughput"]
    objective_s: Seconds
    lower_bound_s: Seconds
    gap: Annotated[float, Field(ge=0)]
    enumerated: Count
    pruned: Count
    solved: Count
    cut_off: Count = 0
    infeasible: Count = 0
    solver: SolverRecord
    constraints: tuple[str, ...] = ()
    pins: dict[str, PinValue] = Field(default_factory=dict[str, PinValue])


class AlternativeRecord(Record):
    """The best plan of another shape, and why it lost."""

    parallelism: Parallelism
    step_time_s: Seconds
    mfu: float | None = None
    fits: bool = True
    total_bytes: Bytes | None = None  # of the fullest stage
    recipe: str = ""  # "Megatron", "FSDP", "DDP" where it is a hand-made one
    why: str


class ProvenanceRecord(Record):
    """What made the document. ``sources``: spec name to where its numbers are from."""

    planner_version: str
    torch_version: str
    ortools_version: str = ""
    stack: str
    sources: dict[str, tuple[str, ...]] = Field(
        default_factory=dict[str, tuple[str, ...]]
    )


class VerdictRecord(Record):
    """Whether a priced configuration fits, and if not by how much and where."""

    fits: bool
    stage: Count  # the fullest, or the one that misses most
    missing_bytes: Bytes = 0
    spare_bytes: Bytes = 0
    message: str

    @classmethod
    def of(cls, memory_per_stage: tuple[MemoryRecord, ...]) -> VerdictRecord:
        """The verdict that the memory lines of all stages give."""
        worst = max(
            range(len(memory_per_stage)),
            key=lambda k: (
                memory_per_stage[k].total_bytes - memory_per_stage[k].limit_bytes
            ),
        )
        memory = memory_per_stage[worst]
        over = memory.total_bytes - memory.limit_bytes
        shown = f"{memory.total_bytes / 2**30:.1f} of {memory.limit_bytes / 2**30:.1f}"
        if over <= 0:
            message = f"fits: stage {worst} is the fullest with {shown} GiB"
        else:
            lines = sorted(memory.lines().items(), key=lambda kv: -kv[1])
            largest = ", ".join(
                f"{name.removesuffix('_bytes').replace('_', ' ')} {v / 2**30:.1f} GiB"
                for name, v in lines
                if v > 0
            )
            message = (
                f"misses by {over / 2**30:.1f} GiB on stage {worst} ({shown} GiB): "
                f"{largest}"
            )
        return cls(
            fits=over <= 0,
            stage=worst,
            missing_bytes=max(0, over),
            spare_bytes=max(0, -over),
            message=message,
        )


def plain(record: Record) -> dict[str, Any]:
    """JSON-ready data of a record; absent (None) values are left out."""
    return record.model_dump(mode="json", exclude_none=True)
