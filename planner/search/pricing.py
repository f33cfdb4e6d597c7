"""Price one op of an OpGraph on one rank: local shape in, device seconds out.

Forward and backward of matrix ops run over the same iteration space with the operand
roles permuted; the rest is bounded by the bytes it moves. Host launches are counted,
not timed, here: a block is launch-bound as a whole, not op by op.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cost_models.attention import attention_time
from cost_models.conv import conv_time
from cost_models.gemm import gemm_time
from cost_models.hardware import DeviceSpec
from cost_models.roofline import pointwise_time
from cost_models.stacks import StackProfile, sustained_rate
from passes.ir import DTYPE_BYTES, Op, OpGraph, OpKind, TensorKind

_MATRIX_DTYPE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
}


@dataclass(frozen=True, slots=True)
class OpPrice:
    """Device seconds and kernel launches of one op on one rank."""

    forward_s: float
    backward_s: float
    forward_kernels: int
    backward_kernels: int
    forward_flops: float
    backward_flops: float


#: Kernels of unfused attention: two products, scale and mask, softmax, dropout; and
#: four products, softmax and dropout backward, with the transposed copies.
MATH_KERNELS = (5, 8)
#: Architectures with matrix units that older kernels do not use.
AFTER_AMPERE = ("hopper", "blackwell")

FREE_OP = OpPrice(0.0, 0.0, 0, 0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """HBM traffic of an op's operands under fusion: indices that really move."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


def traffic_map(graph: OpGraph, fused: bool) -> tuple[Traffic, ...]:
    """Per op, the operands that cross its kernel's boundary.

    Fused: an operand made and used up inside one fusion group stays in registers.
    """
    consumers: dict[str, list[int]] = {}
    producer: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        for name in op.outputs:
            producer[name] = i
        for name in op.inputs:
            consumers.setdefault(name, []).append(i)
    visible = set(graph.outputs)
    result: list[Traffic] = []
    for op in graph.ops:
        if not fused or op.fusion < 0:
            result.append(
                Traffic(tuple(range(len(op.inputs))), tuple(range(len(op.outputs))))
            )
            continue
        reads: list[int] = []
        seen: set[str] = set()
        for k, name in enumerate(op.inputs):
            source = producer.get(name)
            inside = source is not None and graph.ops[source].fusion == op.fusion
            if not inside and name not in seen:
                reads.append(k)
                seen.add(name)
        writes = [
            k
            for k, name in enumerate(op.outputs)
            if name in visible
            or any(graph.ops[c].fusion != op.fusion for c in consumers.get(name, ()))
        ]
        result.append(Traffic(tuple(reads), tuple(writes)))
    return tuple(result)


class Pricer:
    """Prices ops of one graph on one device under one software stack.

    ``precision`` names the matrix units for float32 graphs ("tf32" or "fp32") and for
    quantised compute ("fp8" runs bf16 matrix products on the fp8 units).
    """

    def __init__(
        self,
        graph: OpGraph,
        device: DeviceSpec,
        stack: StackProfile,
        precision: str,
        training: bool,
    ) -> None:
        self.graph, self.device, self.stack = graph, device, stack
        self.precision, self.training = precision, training
        self.fused = stack.fused_pointwise
        self.traffic = traffic_map(graph, self.fused)
        self._tables = embedding_sizes(graph)
        self._cache: dict[tuple[int, str, int, int], OpPrice] = {}
        self._first_of_group = self._group_heads()

    def _group_heads(self) -> frozenset[int]:
        seen: set[int] = set()
        heads: list[int] = []
        for i, op in enumerate(self.graph.ops):
            if op.fusion not in seen:
                heads.append(i)
                if op.fusion >= 0:
                    seen.add(op.fusion)
        return frozenset(heads)

    def dtype(self, op: Op) -> str:
        """The matrix-unit dtype an op computes in."""
        name = self.graph.tensor(op.outputs[0]).dtype
        base = _MATRIX_DTYPE.get(name, "fp32")
        if base == "fp32" and self.precision == "tf32":
            return "tf32"
        if (
            base == "bf16"
            and self.precision in ("fp8", "fp4")
            and op.kind in (OpKind.GEMM, OpKind.GROUPED_GEMM)
            and not self._makes_logits(op)
        ):
            return self.precision
        return base

    def _makes_logits(self, op: Op) -> bool:
        """Whether an op is the head: it stays in 16 bits where layers run in 8."""
        return any(
            t.kind is TensorKind.PARAMETER and t.shape[0] in self._tables
            for t in (self.graph.tensor(name) for name in op.inputs)
            if t.shape
        )

    def price(
        self, index: int, divided: str = "", size: int = 1, ep: int = 1
    ) -> OpPrice:
        """Price op ``index`` with loop dim ``divided`` over ``size`` ranks.

        ``ep`` ranks share the experts: each has 1/ep of them and ep times their rows.
        """
        key = (index, divided, size if divided else 1, ep)
        found = self._cache.get(key)
        if found is None:
            op = self.graph.ops[index]
            local = {d.name: d.size for d in op.space.dims}
            if divided and divided != "+":
                local[divided] = ceil(local[divided] / size)
            if ep > 1:
                experts = expert_dims(self.graph, op)
                if experts is not None:
                    local[experts[0]] = ceil(local[experts[0]] / ep)
                    local[experts[1]] *= ep
            found = self._cache[key] = self.price_local(index, local)
        return found

    def price_local(self, index: int, local: dict[str, int]) -> OpPrice:
        """Price op ``index`` with the given local size of every loop dim."""
        op = self.graph.ops[index]
        if op.kind is OpKind.VIEW:
            return FREE_OP
        if op.kind in (OpKind.GEMM, OpKind.GROUPED_GEMM):
            return self._gemm(op, local)
        if op.kind is OpKind.ATTENTION:
            return self._attention(op, local)
        if op.kind is OpKind.CONV:
            return self._conv(op, local)
        return self._bytes(index, op, local)

    def _scale(self, op: Op, local: dict[str, int]) -> float:
        scale = 1.0
        for dim in op.space.dims:
            if dim.size:
                scale *= local[dim.name] / dim.size
        return scale

    def _backward_parts(self, op: Op) -> tuple[bool, bool]:
        """Whether the gradients of the first and of the second operand are made."""
        if not self.training or op.forward_flops == 0:
            return False, False
        ratio = op.backward_flops / op.forward_flops
        if ratio >= 1.5:
            return True, True
        if ratio < 0.5:
            return False, False
        first = self.graph.tensor(op.inputs[0])
        return (first.requires_grad or first.trainable), not (
            first.requires_grad or first.trainable
        )

    def _gemm(self, op: Op, local: dict[str, int]) -> OpPrice:
        shape = gemm_shape(op, local)
        dtype = self.dtype(op)
        out = int(DTYPE_BYTES[self.graph.tensor(op.outputs[0]).dtype])
        batch, m, n, k = shape
        forward = gemm_time(self.device, m, n, k, batch, dtype, out_bytes=out)
        d_input, d_weight = self._backward_parts(op)
        backward, kernels = 0.0, 0
        if d_input:
            backward += gemm_time(self.device, m, k, n, batch, dtype, "NN", out).time_s
            kernels += 1
        if d_weight:
            backward += gemm_time(self.device, n, k, m, batch, dtype, "TN", out).time_s
            kernels += 1
        scale = self._scale(op, local)
        stack = self.stack
        grouped = op.kind is OpKind.GROUPED_GEMM
        rate = stack.expert_rate if grouped else stack.matrix_rate
        if self.training:
            rate *= sustained_rate(self.device.name, self.device.family, dtype)
        cast_f, cast_b = self._casts(dtype, batch, m, n, k, kernels)
        return OpPrice(
            forward.time_s / rate + cast_f,
            backward / rate + cast_b,
            1,
            kernels,
            op.forward_flops * scale,
            op.backward_flops * scale if self.training else 0.0,
        )

    def _casts(
        self, dtype: str, batch: int, m: int, n: int, k: int, backward: int
    ) -> tuple[float, float]:
        """Seconds to scale and cast operands of an 8-bit product, both directions: one
        pass reads 16 bits and writes 8, and backward needs the output's gradient."""
        passes = self.stack.cast_passes
        if dtype not in ("fp8", "fp4") or not passes:
            return 0.0, 0.0

        def cast(elements: float) -> float:
            return pointwise_time(self.device, 2 * elements, elements).time_s * passes

        return cast(batch * m * k) + cast(batch * n * k), (
            cast(batch * m * n) if backward else 0.0
        )

    def _attention(self, op: Op, local: dict[str, int]) -> OpPrice:
        sizes = attention_shape(op, local)
        kernel = self.stack.attention_kernel if bool(op.attr("fused")) else "math"
        if kernel == "flash" and self.device.arch in ("volta", "turing", "pascal"):
            kernel = "efficient"

        rate, unfused = self.stack.attention_rate, kernel == "math"
        if self.device.arch in AFTER_AMPERE and not unfused:
            rate = self.stack.hopper_attention_rate or rate

        def time(backward: bool) -> float:
            found = attention_time(
                self.device,
                *sizes,
                dtype=self.dtype(op),
                causal=bool(op.attr("causal")),
                kernel=kernel,
                backward=backward,
                window=op.number("window"),
            )
            return found.time_s / rate

        scale = self._scale(op, local)
        train = self.training and op.backward_flops > 0
        return OpPrice(
            time(False),
            time(True) if train else 0.0,
            MATH_KERNELS[0] if unfused else 1,
            (MATH_KERNELS[1] if unfused else 2) if train else 0,
            op.forward_flops * scale,
            op.backward_flops * scale if self.training else 0.0,
        )

    def _conv(self, op: Op, local: dict[str, int]) -> OpPrice:
        ratio = {d.name: local[d.name] / d.size for d in op.space.dims if d.size}
        role = conv_roles(op)

        def cut(name: str) -> float:
            result = 1.0
            for dim in role.get(name, ()):
                result *= ratio.get(dim, 1.0)
            return result

        def sizes(name: str) -> tuple[int, ...]:
            value = op.attr(name)
            assert isinstance(value, tuple)
            return value

        n = max(1, round(op.number("n") * cut("n")))
        ci = max(1, round(op.number("ci") * cut("ci")))
        co = max(1, round(op.number("co") * cut("co")))
        groups = max(1, round(op.number("groups") * cut("groups")))

        def time(direction: str) -> float:
            return (
                conv_time(
                    self.device,
                    n,
                    ci,
                    co,
                    sizes("in_size"),
                    sizes("out_size"),
                    sizes("kernel"),
                    sizes("stride"),
                    groups=groups,
                    dtype=self.dtype(op),
                    direction=direction,
                    channels_last=self.stack.channels_last,
                    transposed=bool(op.attr("transposed")),
                ).time_s
                / self.stack.matrix_rate
            )

        d_input, d_weight = self._backward_parts(op)
        backward = 0.0
        if d_input:
            backward += time("backward_input")
        if d_weight:
            backward += time("backward_weight")
        scale = self._scale(op, local)
        return OpPrice(
            time("forward"),
            backward,
            1,
            int(d_input) + int(d_weight),
            op.forward_flops * scale,
            op.backward_flops * scale if self.training else 0.0,
        )

    def _bytes(self, index: int, op: Op, local: dict[str, int]) -> OpPrice:
        graph, moves = self.graph, self.traffic[index]

        def local_bytes(position: int, output: bool) -> float:
            space = op.space
            operand = (space.outputs if output else space.inputs)[position]
            tensor = graph.tensor(operand.tensor)
            share = 1.0
            for axis in operand.axes:
                for name in axis.dims:
                    full = space.dim(name).size
                    share *= local[name] / full if full else 1.0
            size = tensor.nbytes * share
            if op.kind in (OpKind.EMBEDDING, OpKind.GATHER) and not output:
                # a lookup touches as many rows as it returns, not the table
                produced = sum(graph.tensor(t).nbytes for t in op.outputs)
                size = min(size, produced)
            return size

        # each operand's size is taken once
        read = sum(
            local_bytes(i, False) for i in moves.reads if i < len(op.space.inputs)
        )
        write = sum(
            local_bytes(i, True) for i in moves.writes if i < len(op.space.outputs)
        )
        head = index in self._first_of_group
        kernels = 1 if (not self.fused or op.fusion < 0 or head) else 0
        flops = op.pointwise_flops * self._scale(op, local)
        forward = (
            pointwise_time(self.device, read, write, flops).time_s
            if read + write > 0
            else 0.0
        )
        differentiable = self.training and any(
            graph.tensor(t).requires_grad for t in op.outputs
        )
        backward = 0.0
        if differentiable:
            grads_in = sum(
                local_bytes(i, False)
                for i in moves.reads
                if i < len(op.space.inputs)
                and (
                    graph.tensor(op.inputs[i]).requires_grad
                    or graph.tensor(op.inputs[i]).trainable
                )
            )
            saved = sum(
                local_bytes(i, False)
                for i in moves.reads
                if i < len(op.space.inputs)
                and any(s.tensor == op.inputs[i] for s in op.saved)
            )
            if op.kind is OpKind.EMBEDDING:
                grads_in = write
            moved = write + saved + grads_in
            if moved > 0:
                backward = pointwise_time(
                    self.device, write + saved, grads_in, 2 * flops
                ).time_s
        rate = self.stack.memory_rate
        return OpPrice(
            forward / rate,
            backward / rate,
            kernels,
            kernels if differentiable else 0,
            0.0,
            0.0,
        )


def embedding_sizes(graph: OpGraph) -> frozenset[int]:
    """Rows of the tables that embeddings look up: the vocabulary."""
    return frozenset(
        tensor.shape[0]
        for op in graph.ops
        if op.kind is OpKind.EMBEDDING
        for tensor in (graph.tensor(name) for name in op.inputs)
        if tensor.kind is TensorKind.PARAMETER and len(tensor.shape) == 2
    )


def gemm_shape(op: Op, local: dict[str, int]) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a matrix product from its space and local dim sizes."""

    def names(position: int, output: bool = False) -> set[str]:
        operand = (op.space.outputs if output else op.space.inputs)[position]
        return {d for axis in operand.axes for d in axis.dims}

    a, b, out = names(0), names(1), names(0, output=True)
    batch = m = n = k = 1
    for dim in op.space.dims:
        size = local[dim.name]
        in_a, in_b, in_out = dim.name in a, dim.name in b, dim.name in out
        if in_a and in_b and in_out:
            batch *= size
        elif in_out and in_a:
            m *= size
        elif in_out and in_b:
            n *= size
        elif in_a and in_b:
            k *= size
    return batch, m, n, k


def expert_dims(graph: OpGraph, op: Op) -> tuple[str, str] | None:
    """(expert dim, dim of an expert's rows) of a product with one weight per expert."""
    if op.kind not in (OpKind.GEMM, OpKind.GROUPED_GEMM) or len(op.space.inputs) < 2:
        return None
    weight = graph.tensor(op.inputs[1])
    if weight.kind is not TensorKind.PARAMETER or len(weight.shape) != 3:
        return None
    rows = {d for axis in op.space.inputs[0].axes for d in axis.dims}
    columns = {d for axis in op.space.inputs[1].axes for d in axis.dims}
    out = {d for axis in op.space.outputs[0].axes for d in axis.dims}
    experts = [d.name for d in op.space.dims if d.name in rows & columns & out]
    own = [d.name for d in op.space.dims if d.name in (rows & out) - columns]
    return (experts[0], own[-1]) if experts and own else None


def attention_shape(op: Op, local: dict[str, int]) -> tuple[int, ...]:
    """(batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim) on one rank."""
    full = {d.name: d.size for d in op.space.dims}
    names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "qk_dim", "v_dim")
    values = {name: op.number(name) for name in names}

    def cut(dim: str) -> float:
        return local[dim] / full[dim] if full.get(dim) else 1.0

    scaled = {
        "batch": cut("b"),
        "q_heads": cut("h") * cut("g"),
        "kv_heads": cut("h"),
        "q_len": cut("q"),
        "kv_len": cut("kv"),
    }
    return tuple(max(1, ceil(values[n] * scaled.get(n, 1.0))) for n in names)


def conv_roles(op: Op) -> dict[str, tuple[str, ...]]:
    """Which loop dims make up the batch, channels and groups of a convolution."""
    x, w = op.space.inputs[0], op.space.inputs[1]
    out = op.space.outputs[0]
    batch = x.axes[0].dims if len(x.axes) == len(w.axes) else ()
    return {
        "n": batch,
        "ci": x.axes[1].dims if len(x.axes) == len(w.axes) else x.axes[0].dims,
        "co": out.axes[1].dims if len(out.axes) == len(w.axes) else out.axes[0].dims,
        "groups": tuple(
            d
            for d in (x.axes[1].dims if len(x.axes) > 1 else ())
            if len(out.axes) > 1 and d in out.axes[1].dims
        ),
    }


def is_weight(graph: OpGraph, name: str) -> bool:
    """Whether a tensor is a parameter or buffer."""
    return graph.tensor(name).kind in (TensorKind.PARAMETER, TensorKind.BUFFER)
