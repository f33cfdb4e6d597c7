"""The operator graph: an immutable, torch-free record of what a model computes.

An :class:`OpGraph` is what the passes hand to the planner. Every op carries its
**iteration space**: named loop dims with sizes, and how each axis of each operand is
indexed by them. FLOPs, bytes, legal shardings and local shapes all follow from it:

* a mesh axis on a ``PARALLEL`` dim shards every operand that the dim indexes and
  leaves the operands it does not index replicated;
* on a ``REDUCTION`` dim it leaves the outputs partial sums;
* a ``COUPLED`` dim (softmax, norm, scan, sort) must be whole on one rank.

Sizes are elements, ``*_bytes`` are bytes, ``*_flops`` floating-point operations (a
multiply-add is two). Shapes are those of one traced micro-batch; dims with
``per_sample > 0`` have ``size == per_sample * graph.batch`` and rescale with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from passes._compat import StrEnum


class DimKind(StrEnum):
    """What may happen to a loop dim when a mesh axis divides it."""

    PARALLEL = "parallel"
    REDUCTION = "reduction"
    COUPLED = "coupled"


class OpKind(StrEnum):
    """Family of an op: decides which cost model prices it."""

    GEMM = "gemm"  # dense or batched matrix product, linear included
    GROUPED_GEMM = "grouped_gemm"  # one product per expert (MoE)
    CONV = "conv"  # implicit GEMM; `attrs` carries the geometry
    IM2COL = "im2col"  # materialised patches
    ATTENTION = "attention"  # fused scaled-dot-product attention
    POINTWISE = "pointwise"
    REDUCE = "reduce"  # sum, mean, amax ...
    NORM = "norm"  # layer, RMS, batch, group norm
    SOFTMAX = "softmax"
    EMBEDDING = "embedding"
    LOSS = "loss"
    POOL = "pool"
    VIEW = "view"  # no bytes move: view, transpose, split, expand
    COPY = "copy"  # bytes move unchanged: cat, contiguous, pad, roll
    GATHER = "gather"  # index, gather, scatter, MoE dispatch and combine
    SORT = "sort"  # topk, sort, cumsum
    SCAN = "scan"  # recurrences: RNN, state space
    RANDOM = "random"  # dropout, rand
    CREATE = "create"  # arange, zeros, full
    UNKNOWN = "unknown"  # no map: replicated, and the plan says so


class TensorKind(StrEnum):
    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    ACTIVATION = "activation"
    SAVED = "saved"  # kept for backward, not visible in the forward graph


DTYPE_BYTES: dict[str, float] = {
    "float64": 8,
    "complex128": 16,
    "complex64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. ``aliases`` are the other names of a tied parameter (listed once)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a torch dtype name without "torch."
    kind: TensorKind
    trainable: bool = False
    persistent: bool = True  # in the state dict (buffers may not be)
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False  # activations: a gradient flows through it
    per_sample: tuple[int, ...] = ()  # size per sample of each axis, 0: fixed

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name}: unknown dtype {self.dtype!r}")
        if any(s < 0 for s in self.shape):
            raise ValueError(f"tensor {self.name}: negative size in {self.shape}")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return int(self.numel * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class Dim:
    """One loop dim. ``per_sample`` > 0: the size is ``per_sample x batch``."""

    name: str
    size: int
    kind: DimKind = DimKind.PARALLEL
    per_sample: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """How one tensor axis is indexed.

    ``dims``: loop dims, outer to inner, whose product is the axis's size; empty: every
    iteration needs the whole axis (broadcast, table lookup, slice), so it can not be
    sharded. ``window``: dims overlap (output position and kernel offset), so sharding
    the first needs a halo. ``parts``: the axis is a concatenation of parts, each
    divided along ``dims`` (fused QKV: ``parts=(4096, 1024, 1024)``); a shard takes its
    share of every part.
    """

    dims: tuple[str, ...] = ()
    window: bool = False
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as an op uses it: one :class:`Axis` per tensor axis."""

    tensor: str
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class IterationSpace:
    """Named loop dims and the operands they index (inputs and outputs in op order)."""

    dims: tuple[Dim, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    def __post_init__(self) -> None:
        names = {d.name for d in self.dims}
        if len(names) != len(self.dims):
            raise ValueError(f"duplicate dims in {self.dims}")
        for operand in self.inputs + self.outputs:
            for axis in operand.axes:
                if not names.issuperset(axis.dims):
                    raise ValueError(f"{operand.tensor}: {axis.dims} not in {names}")

    def dim(self, name: str) -> Dim:
        return next(d for d in self.dims if d.name == name)


Attr = int | float | str | bool | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One operator.

    ``forward_flops`` / ``backward_flops`` follow torch's FlopCounterMode for matrix
    ops and are 0 for the rest; ``pointwise_flops`` is the vector work (one per output
    element and arithmetic op). ``saved`` lists what autograd keeps from this op's
    forward for its backward, each once per graph (the first op that saves it owns
    it). ``fusion`` groups ops that one kernel runs when compiled (-1: alone).
    ``attrs`` by kind (all ints unless said):

    * GEMM, GROUPED_GEMM: batch, m, n, k (per group for grouped), groups; weight (str
      name of the parameter operand, "" if both are activations)
    * CONV: n, ci, co, groups, transposed (bool), in_size, out_size, kernel, stride,
      padding, dilation (tuples, one per spatial dim)
    * ATTENTION: batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim, causal (bool),
      window (0: none), fused (bool), dropout (float)
    """

    name: str
    target: str  # e.g. "aten.linear.default"
    kind: OpKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    space: IterationSpace
    forward_flops: int = 0
    backward_flops: int = 0
    pointwise_flops: int = 0
    saved: tuple[Operand, ...] = ()
    module: str = ""  # dotted path of the owning module, "" for the root
    phase: str = "forward"
    fusion: int = -1
    attrs: tuple[tuple[str, Attr], ...] = ()

    def attr(self, name: str) -> Attr:
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"op {self.name} ({self.kind}) has no attribute {name!r}")

    def number(self, name: str) -> int:
        """A whole-number attribute."""
        value = self.attr(name)
        assert not isinstance(value, tuple | str), f"{self.name}: {name} is {value!r}"
        return int(value)


@dataclass(frozen=True, slots=True)
class Block:
    """A run ``ops[start:stop]`` that a pipeline stage takes whole.

    Blocks with the same ``kind`` have the same structure, shapes and dtypes (they are
    priced and solved once). ``inputs`` are the activations that cross into the block;
    each run of ops is contiguous in topological order and blocks cover all ops.
    """

    index: int
    name: str  # module path, e.g. "model.layers.3"; "embed" / "head" otherwise
    kind: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class OpGraph:
    """A whole traced model, in topological order."""

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    blocks: tuple[Block, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int  # samples in the traced micro-batch
    seq_len: int = 0  # tokens per sample, 0 where the model has none
    warnings: tuple[str, ...] = ()
    _index: dict[str, int] = field(
        default_factory=dict[str, int],
        init=False,
        repr=False,
        compare=False,
        hash=False,
    )

    def __post_init__(self) -> None:
        index = {t.name: i for i, t in enumerate(self.tensors)}
        if len(index) != len(self.tensors):
            raise ValueError("duplicate tensor names in the graph")
        object.__setattr__(self, "_index", index)
        known = set(index)
        for op in self.ops:
            missing = [t for t in op.inputs + op.outputs if t not in known]
            if missing:
                raise ValueError(f"op {op.name}: unknown tensors {missing}")
        spans = [(b.start, b.stop) for b in self.blocks]
        if self.blocks and (
            spans[0][0] != 0
            or spans[-1][1] != len(self.ops)
            or any(a[1] != b[0] for a, b in pairwise(spans))
        ):
            raise ValueError("blocks must cover the ops without gap or overlap")

    def tensor(self, name: str) -> Tensor:
        return self.tensors[self._index[name]]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.kind is TensorKind.PARAMETER)

    @property
    def parameter_count(self) -> int:
        return sum(t.numel for t in self.parameters)

    def with_ops(self, ops: tuple[Op, ...]) -> OpGraph:
        return replace(self, ops=ops)
