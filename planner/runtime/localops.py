"""Run one traced op on local shards.

An op's strategy names the loop dim that a mesh axis divides. Most ops then run as they
are on the local operands; the rest is here: sizes in arguments become local sizes, a
mean is scaled, a bias of a partial product is added once, a looked-up table of rows
masks foreign ids, a loss exchanges its row statistics, a causal mask knows its rows,
ops that make a tensor make all of it and keep their part. The result's shape is checked
against the placement, so that an op that a case is missing for fails by name.
"""

from __future__ import annotations

# pyright: reportUnnecessaryIsInstance=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from passes.ir import Op, OpKind
from planner.errors import PlannerError
from planner.runtime.comm import Axis, summed
from planner.runtime.layout import cut, local_shape
from planner.search.placements import Placement
from planner.search.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Run:
    """How one mesh axis runs the op."""

    axis: Axis
    strategy: Strategy

    @property
    def divides(self) -> bool:
        return self.axis.size > 1 and self.strategy.dim not in ("", "+")


@dataclass(slots=True)
class Call:
    """One execution: bound arguments with local tensors, and what is known of them."""

    op: Op
    target: Any
    args: dict[str, Any]
    runs: tuple[Run, ...]
    out_shapes: tuple[tuple[int, ...], ...]  # full
    full_inputs: dict[int, tuple[int, ...]]  # id of a local tensor -> full shape
    device: torch.device

    @property
    def dividing(self) -> list[Run]:
        return [r for r in self.runs if r.divides]

    def local_out(self, k: int = 0) -> tuple[int, ...]:
        """Local shape of output ``k``."""
        shape = self.out_shapes[k]
        for run in self.runs:
            p = run.strategy.outputs[k]
            shape = local_shape(shape, p, run.axis.size, run.axis.rank)
        return shape

    def keep_part(self, full: Tensor, k: int = 0) -> Tensor:
        """This rank's part of a whole output."""
        for run in self.runs:
            p = run.strategy.outputs[k]
            full = cut(full, p, run.axis.size, run.axis.rank)
        return full

    def invoke(self, /, **changes: Any) -> Any:
        """Call the op with some arguments replaced."""
        return invoke(self.target, {**self.args, **changes})


Handler = Callable[[Call], Any]
_HANDLERS: dict[str, Handler] = {}


def handles(*packets: str) -> Callable[[Handler], Handler]:
    """Register how ops of these names run on shards."""

    def register(function: Handler) -> Handler:
        for packet in packets:
            assert packet not in _HANDLERS, packet
            _HANDLERS[packet] = function
        return function

    return register


def invoke(target: Any, bound: dict[str, Any]) -> Any:
    """Call an overload with arguments by schema name."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return target(*bound.values())
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.name not in bound:
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = bound[argument.name]
        else:
            args.append(bound[argument.name])
    return target(*args, **kwargs)


def packet_of(target: str) -> str:
    """``aten.linear.default`` -> ``linear``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def functional(target: Any) -> Any:
    """The overload that does the same without writing into its first argument."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target
    name = schema.name.split("::")[1]
    if not name.endswith("_"):
        return target  # batch_norm and friends: they write into buffers only
    packet = getattr(torch.ops.aten, name[:-1], None)
    overload = target._overloadname
    found = getattr(packet, overload, None) or getattr(packet, "default", None)
    if found is None:
        raise PlannerError(
            "an in-place op has no functional form",
            str(target),
            "write it out of place",
        )
    return found


def run_op(call: Call) -> Any:
    """The op's local outputs: a tensor, or a tuple as the op returns it."""
    for name in ("device", "pin_memory"):
        if call.args.get(name) is not None:
            call.args[name] = call.device if name == "device" else False
    packet = packet_of(call.op.target)
    handler = _HANDLERS.get(packet) or _HANDLERS.get(packet.rstrip("_"))
    if handler is not None and (
        call.dividing or call.op.kind in (OpKind.VIEW, OpKind.CREATE, OpKind.RANDOM)
    ):
        out = handler(call)
    elif call.dividing and call.op.kind is OpKind.RANDOM:
        out = _random(call)
    elif call.dividing and call.op.kind is OpKind.CREATE:
        out = _create(call)
    else:
        out = call.invoke()
    return _checked(call, out)


def _checked(call: Call, out: Any) -> Any:
    """Shapes as the placements say; a whole result of whole inputs is cut."""
    single = isinstance(out, Tensor)
    items = [out] if single else list(out)
    k = 0
    for i, item in enumerate(items):
        if not isinstance(item, Tensor) or k >= len(call.out_shapes):
            continue
        wanted = call.local_out(k)
        if tuple(item.shape) != wanted:
            if tuple(item.shape) != call.out_shapes[k]:
                raise PlannerError(
                    f"{call.op.target} does not run on shards of this kind",
                    f"{call.op.name}: {tuple(item.shape)} in place of {wanted}",
                    "replicate the op",
                )
            items[i] = call.keep_part(item, k)
        k += 1
    return items[0] if single else tuple(items)


# ---- views -----------------------------------------------------------------------


@handles(
    "view", "reshape", "_unsafe_view", "view_copy", "_reshape_copy", "unflatten",
    "flatten", "squeeze", "unsqueeze", "ravel", "view_as", "reshape_as",
)  # fmt: skip
def _reshape(call: Call) -> Tensor:
    return cast(Tensor, next(iter(call.args.values()))).reshape(call.local_out())


@handles("expand", "broadcast_to", "expand_as")
def _expand(call: Call) -> Tensor:
    return cast(Tensor, next(iter(call.args.values()))).expand(call.local_out())


@handles(
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk",
    "unsafe_split", "unsafe_split_with_sizes",
)  # fmt: skip
def _split(call: Call) -> Any:
    x = cast(Tensor, next(iter(call.args.values())))
    axis = int(call.args.get("dim", 0)) % x.dim()
    sizes = [call.local_out(k)[axis] for k in range(len(call.out_shapes))]
    if sum(sizes) != x.shape[axis]:
        return call.invoke()
    return torch.split(x, sizes, axis)


@handles("slice", "narrow")
def _slice(call: Call) -> Tensor:
    x = cast(Tensor, call.args["self"])
    axis = int(call.args.get("dim", 0)) % x.dim()
    full = call.full_inputs[id(x)][axis]
    length = call.local_out()[axis]
    if full == x.shape[axis]:
        return call.invoke()
    if length == x.shape[axis]:
        return x
    start = call.args.get("start") or 0
    start = start + full if start < 0 else start
    # parts before this one are divided alike, so the start moves in proportion
    assert start * x.shape[axis] % full == 0, (call.op.name, start, full)
    return x.narrow(axis, start * x.shape[axis] // full, length)


# ---- creation and randomness -----------------------------------------------------


@handles(
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like",
)  # fmt: skip
def _like(call: Call) -> Tensor:
    x = cast(Tensor, call.args["self"])
    return _create_from(call, {"self": x.new_empty(call.out_shapes[0])})


def _create_from(call: Call, changes: dict[str, Any]) -> Tensor:
    return call.keep_part(call.invoke(**changes)).contiguous()


def _create(call: Call) -> Tensor:
    return _create_from(call, {})


def _random(call: Call) -> Any:
    """Each rank its own stream where the op is divided; the common one moves alike."""
    seed = int(torch.randint(2**31, (1,)).item())
    rank = 0
    for run in call.dividing:
        rank = rank * run.axis.size + run.axis.rank
    devices = [call.device] if call.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + rank)
        return call.invoke()


# ---- products --------------------------------------------------------------------


class _BiasOnce(torch.autograd.Function):
    """Adds a bias to one rank's addend of a sum; its gradient is whole everywhere."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor, dims: tuple[int, ...], add: bool
    ) -> Tensor:
        ctx.dims, ctx.shape = dims, bias.shape
        if not add:
            return y.view_as(y)
        return y + _aligned(bias, y.dim(), dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gone = [d for d in range(grad.dim()) if d not in ctx.dims]
        return grad, grad.sum(gone).reshape(ctx.shape), None, None


def _aligned(bias: Tensor, rank: int, dims: tuple[int, ...]) -> Tensor:
    shape = [1] * rank
    for d, n in zip(dims, bias.shape, strict=True):
        shape[d] = n
    return bias.reshape(shape)


def _partial(call: Call) -> list[Run]:
    return [r for r in call.dividing if r.strategy.outputs[0].kind == "P"]


def _with_bias_once(
    call: Call, name: str, product: Tensor, dims: tuple[int, ...]
) -> Tensor:
    add = all(r.axis.rank == 0 for r in _partial(call))
    return cast(Tensor, _BiasOnce.apply(product, call.args[name], dims, add))


@handles("linear")
def _linear(call: Call) -> Tensor:
    bias = call.args.get("bias")
    if bias is None or not _partial(call):
        return call.invoke()
    y = call.invoke(bias=None)
    return _with_bias_once(call, "bias", y, (y.dim() - 1,))


@handles("addmm", "baddbmm")
def _addmm(call: Call) -> Tensor:
    if not _partial(call):
        return call.invoke()
    if call.args.get("beta", 1) != 1 or call.args.get("alpha", 1) != 1:
        raise PlannerError("addmm with factors does not run as a partial sum")
    names = ("mat1", "mat2") if "mat1" in call.args else ("batch1", "batch2")
    y = torch.matmul(call.args[names[0]], call.args[names[1]])
    bias = call.args["self"]
    dims = tuple(range(y.dim() - bias.dim(), y.dim()))
    return _with_bias_once(call, "self", y, dims)


@handles("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
         "conv_transpose2d", "conv_transpose3d")  # fmt: skip
def _conv(call: Call) -> Tensor:
    groups = int(call.args.get("groups", 1))
    for run in call.dividing:
        if run.strategy.dim == "g":
            groups //= run.axis.size
    bias = call.args.get("bias")
    if bias is None or not _partial(call):
        return call.invoke(groups=groups)
    y = call.invoke(groups=groups, bias=None)
    channel = y.dim() - (call.args["weight"].dim() - 2) - 1
    return _with_bias_once(call, "bias", y, (channel,))


@handles("embedding")
def _embedding(call: Call) -> Tensor:
    rows = [r for r in _partial(call) if r.strategy.inputs[0].kind == "S"]
    weight, ids = call.args["weight"], call.args["indices"]
    if not rows:
        return call.invoke()
    (run,) = rows
    total = call.full_inputs[id(weight)][0]
    step = -(-total // run.axis.size)
    local = ids - run.axis.rank * step
    mine = (local >= 0) & (local < weight.shape[0])
    padding = int(call.args.get("padding_idx", -1)) - run.axis.rank * step
    out = F.embedding(
        local.clamp(0, max(0, weight.shape[0] - 1)),
        weight,
        padding if 0 <= padding < weight.shape[0] else None,
    )
    return out * mine.unsqueeze(-1).to(out.dtype)


# ---- norms, means, attention -----------------------------------------------------


@handles("group_norm")
def _group_norm(call: Call) -> Tensor:
    groups = int(call.args["num_groups"])
    for run in call.dividing:
        if run.strategy.dim == "g":
            groups //= run.axis.size
    return call.invoke(num_groups=groups)


def _fraction(call: Call, x: Tensor) -> float:
    """Elements of ``x`` here over those of the whole."""
    whole = 1
    for n in call.full_inputs[id(x)]:
        whole *= n
    return x.numel() / whole


@handles("mean")
def _mean(call: Call) -> Tensor:
    y = call.invoke()
    if _partial(call):
        return y * _fraction(call, cast(Tensor, call.args["self"]))
    return y


@handles("scaled_dot_product_attention")
def _sdpa(call: Call) -> Tensor:
    rows = [r for r in call.dividing if r.strategy.dim == "q"]
    if rows and call.args.get("is_causal"):
        q, k = call.args["query"], call.args["key"]
        (run,) = rows
        axis = q.dim() - 2
        total = call.full_inputs[id(q)][axis]
        positions = torch.arange(total, device=q.device)
        mine = cut(positions, Placement("S", 0), run.axis.size, run.axis.rank)
        mask = mine[:, None] >= torch.arange(k.shape[axis], device=q.device)
        return call.invoke(is_causal=False, attn_mask=mask)
    if call.args.get("dropout_p"):
        return _random(call)
    return call.invoke()


# ---- losses ----------------------------------------------------------------------


@handles("cross_entropy_loss")
def _cross_entropy(call: Call) -> Tensor:
    x, target = call.args["self"], call.args["target"]
    weight = call.args.get("weight")
    reduction = int(call.args.get("reduction", 1))
    ignore = int(call.args.get("ignore_index", -100))
    smoothing = float(call.args.get("label_smoothing", 0.0))
    classes = [r for r in call.dividing if r.strategy.dim == "c"]
    rows = [r for r in call.dividing if r.strategy.dim != "c"]
    if target.is_floating_point() or (classes and weight is not None):
        raise PlannerError(
            "a divided loss takes class indices without weights",
            call.op.name,
            "replicate the loss",
        )
    if classes:
        losses = _divided_classes(call, classes[0], x, target, ignore, smoothing)
    else:
        losses = F.cross_entropy(
            x, target, weight, ignore_index=ignore, reduction="none",
            label_smoothing=smoothing,
        )  # fmt: skip
    if reduction == 0:
        return losses
    total = losses.sum()
    valid = target != ignore
    count = valid.sum().to(total.dtype)
    if weight is not None:
        count = weight[target.clamp(0)].mul(valid).sum()
    for run in rows:
        total: Tensor = summed(total, run.axis)
        if reduction == 1:
            count = run.axis.all_reduce(count, "forward")
    return total / count if reduction == 1 else total


def _divided_classes(
    call: Call, run: Run, x: Tensor, target: Tensor, ignore: int, smoothing: float
) -> Tensor:
    """Per-row losses with divided classes: maximum, sum and target are exchanged."""
    axis, dim = run.axis, 1 if x.dim() > 1 else 0
    total = call.full_inputs[id(x)][dim]
    step = -(-total // axis.size)
    top = axis.all_reduce(x.detach().amax(dim), "forward", maximum=True)
    z = x - top.unsqueeze(dim)
    denominator = summed(z.exp().sum(dim), axis)
    local = target - axis.rank * step
    mine = (local >= 0) & (local < x.shape[dim])
    at = local.clamp(0, x.shape[dim] - 1).unsqueeze(dim)
    picked = z.gather(dim, at).squeeze(dim).masked_fill(~mine, 0)
    losses = denominator.log() - summed(picked, axis)
    if smoothing:
        spread = denominator.log() - summed(z.sum(dim), axis) / total
        losses = (1 - smoothing) * losses + smoothing * spread
    return losses.masked_fill(target == ignore, 0)


@handles(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "soft_margin_loss",
)  # fmt: skip
def _elementwise_loss(call: Call) -> Tensor:
    y = call.invoke()
    if call.out_shapes[0]:
        return y
    if int(call.args.get("reduction", 1)) == 1:
        y = y * _fraction(call, cast(Tensor, call.args["self"]))
    for run in call.dividing:
        y = summed(y, run.axis)
    return y
