"""Reads a :class:`ServingModel` off a traced graph.

Products come with the tensor split that the data flow implies: a product whose input
comes straight from attention or another product closes a pair (``row``), one behind the
residual stream opens one (``column``), one that only feeds another product or
chooses experts is repeated (``none``). Cached elements are those of the narrowest
tensors from which an attention's K and V follow by views alone (heads are counted
before they are repeated), or of a compressed projection that both are computed from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from passes.ir import Block, Op, OpGraph, OpKind, TensorKind
from planner.errors import PlannerError
from planner.serving.model import Attention, Layer, Product, ServingModel, Split

MATRIX = (OpKind.GEMM, OpKind.GROUPED_GEMM)
#: Ops that keep what a token's vector is, up to scale and order.
MOVES = (OpKind.VIEW, OpKind.COPY)
FREE = (OpKind.VIEW, OpKind.CREATE)


class Flow:
    """Who writes and who reads each activation of a graph."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.writer: dict[str, Op] = {}
        self.readers: dict[str, list[Op]] = {}
        for op in graph.ops:
            for name in op.outputs:
                self.writer[name] = op
            for name in op.inputs:
                self.readers.setdefault(name, []).append(op)
        self.tokens = graph.batch * max(1, graph.seq_len)
        self.hidden = self._hidden()

    def _hidden(self) -> int:
        widths: Counter[int] = Counter()
        for op in self.graph.ops:
            if self.is_residual(op):
                widths[self.graph.tensor(op.outputs[0]).shape[-1]] += 1
        if not widths:
            raise PlannerError(
                "the model has no residual stream to serve",
                "no sum of two activations",
                "give a decoder of the transformer family",
            )
        return max(sorted(widths), key=lambda w: (widths[w], w))

    def is_residual(self, op: Op) -> bool:
        """A sum of two activations of equal shape, one vector a token."""
        if op.kind is not OpKind.POINTWISE or ".add" not in op.target:
            return False
        shapes = [
            self.graph.tensor(n).shape
            for n in op.inputs
            if self.graph.tensor(n).kind is TensorKind.ACTIVATION
        ]
        out = self.graph.tensor(op.outputs[0])
        plain = len(shapes) == 2 and set(shapes) == {out.shape}
        known = getattr(self, "hidden", 0)
        width = out.shape[-1] if out.shape else 0
        return plain and len(out.shape) <= 3 and known in (0, width)

    def activations(self, op: Op) -> tuple[str, ...]:
        kinds = (TensorKind.PARAMETER, TensorKind.BUFFER)
        return tuple(n for n in op.inputs if self.graph.tensor(n).kind not in kinds)

    def sources(self, name: str, through_norm: bool = True) -> tuple[Op, ...]:
        """Products and attentions behind ``name``, not through other products nor the
        residual stream."""
        found: dict[str, Op] = {}
        seen: set[str] = set()
        todo = [name]
        while todo:
            tensor = todo.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            op = self.writer.get(tensor)
            if op is None or self.is_residual(op):
                continue
            if op.kind in MATRIX or op.kind is OpKind.ATTENTION:
                found[op.name] = op
            elif op.kind is not OpKind.NORM or through_norm:
                todo.extend(self.activations(op))
        return tuple(found.values())

    def narrowest(self, name: str) -> int:
        """Elements of the smallest tensor that ``name`` is a view or repetition of."""
        least = self.graph.tensor(name).numel
        while True:
            op = self.writer.get(name)
            if op is None or op.kind not in MOVES:
                return least
            inputs = self.activations(op)
            if len(inputs) != 1 or len(op.outputs) != 1:
                return least
            name = inputs[0]
            least = min(least, self.graph.tensor(name).numel)


def extract(
    graph: OpGraph, name: str, windows: Mapping[int, int] | None = None
) -> ServingModel:
    """The serving model of ``graph``.

    ``windows``: window by position of the attention in the model, where the graph only
    has masks. Raises PlannerError for a model without attention over tokens.
    """
    flow = Flow(graph)
    runs: list[tuple[Layer, int]] = []
    head = _head(graph, flow)
    position = 0
    tables = _tables(graph)
    tied = False
    placed: set[str] = set()
    for block in graph.blocks:
        layer = _layer(flow, block, windows or {}, position, placed, tables, head)
        position += len(layer.attentions)
        if not layer.products and not layer.attentions:
            runs.append((layer, 1))
        elif runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    if position == 0:
        raise PlannerError(
            "the model has no attention over tokens",
            name,
            "serving plans are for language models; use optimize for others",
        )
    bare = sum(layer.other for layer, _ in runs if not layer.products)
    layers = tuple((layer, n) for layer, n in runs if layer.products)
    table_elements = sum(n for key, n in tables.items() if key != "vocab")
    total = graph.parameter_count
    inside = sum(
        (sum(p.elements for p in layer.products) + layer.other) * n
        for layer, n in layers
    )
    vocab = head.number("n") if head is not None else tables.get("vocab", 0)
    rest = total - inside - table_elements - bare
    head_size = vocab * flow.hidden
    tied = rest < head_size
    other = bare + rest - (0 if tied else head_size)
    return ServingModel(
        name, flow.hidden, vocab, layers, table_elements, tied, other=other
    )


def _head(graph: OpGraph, flow: Flow) -> Op | None:
    """The product that makes the logits: the last one, as wide as a table is long."""
    rows = _tables(graph).get("vocab", 0)
    found = [op for op in graph.ops if op.kind is OpKind.GEMM][-1:]
    fits = [o for o in found if o.number("k") == flow.hidden and o.number("n") >= rows]
    return fits[0] if fits and rows else None


def _tables(graph: OpGraph) -> dict[str, int]:
    """Elements of every embedding table; "vocab": rows of the largest."""
    found: dict[str, int] = {}
    rows = 0
    for op in graph.ops:
        if op.kind is not OpKind.EMBEDDING:
            continue
        for name in op.inputs:
            tensor = graph.tensor(name)
            if tensor.kind is TensorKind.PARAMETER:
                found[name] = tensor.numel
                rows = max(rows, tensor.shape[0])
    if rows:
        found["vocab"] = rows
    return found


def _layer(
    flow: Flow,
    block: Block,
    windows: Mapping[int, int],
    position: int,
    placed: set[str],
    tables: Mapping[str, int],
    head: Op | None,
) -> Layer:
    graph = flow.graph
    ops = graph.ops[block.start : block.stop]
    experts = {op.number("groups") for op in ops if op.kind is OpKind.GROUPED_GEMM}
    attentions = [op for op in ops if op.kind is OpKind.ATTENTION]
    inner = _inner(flow, ops)
    fused: dict[tuple[object, ...], Product] = {}
    weights = 0
    for op in ops:
        if op.kind not in MATRIX or op is head or not op.attr("weight"):
            continue
        product = _product(flow, op, experts, inner, block.name)
        key = (flow.activations(op)[0], product.k, product.split, product.experts)
        before = fused.get(key)
        if before is not None and product.quantised == before.quantised:
            n = before.n + product.n
            product = Product(
                before.name, n, product.k, product.split, product.experts,
                product.chosen, product.quantised,
            )  # fmt: skip
            fused[key] = product
        elif before is not None:
            fused[(*key, op.name)] = product
        else:
            fused[key] = product
    products = tuple(fused.values())
    for name in {n for op in ops for n in op.inputs}:
        tensor = graph.tensor(name)
        fresh = name not in placed and name not in tables
        fresh = fresh and (head is None or name not in head.inputs)
        if tensor.kind is TensorKind.PARAMETER and fresh:
            placed.add(name)
            weights += tensor.numel
    other = max(0, weights - sum(p.elements for p in products))
    found = tuple(
        _attention(flow, op, windows.get(position + i))
        for i, op in enumerate(attentions)
    )
    kernels = sum(op.kind not in FREE for op in ops)
    return Layer(products, found, other, _state(flow, ops, bool(found)), kernels)


def _product(
    flow: Flow, op: Op, experts: set[int], inner: set[str], block: str
) -> Product:
    n, k = op.number("n"), op.number("k")
    name = str(op.attr("weight")).removeprefix(block + ".").removesuffix(".weight")
    if op.kind is OpKind.GROUPED_GEMM:
        groups = op.number("groups")
        chosen = max(1, round(op.number("m") * groups / flow.tokens))
        split: Split = "row" if n == flow.hidden else "column"
        return Product(name, n, k, split, groups, chosen)
    if n in experts and k == flow.hidden:
        return Product(name, n, k, "none", quantised=False)
    return Product(name, n, k, _split(flow, op, inner))


def _split(flow: Flow, op: Op, inner: set[str]) -> Split:
    """``inner``: products that only feed another product of the same block."""
    if op.name in inner:
        return "none"
    closes = flow.sources(flow.activations(op)[0], through_norm=False)
    return "row" if closes and op.number("n") == flow.hidden else "column"


def _inner(flow: Flow, ops: tuple[Op, ...]) -> set[str]:
    """Down-projections of a compressed pair: what they make is the input of a product
    that does not lead back to the residual stream."""
    found: set[str] = set()
    for op in ops:
        if op.kind is OpKind.GEMM and op.number("n") != flow.hidden:
            behind = flow.sources(flow.activations(op)[0])
            found.update(o.name for o in behind if o.kind is OpKind.GEMM)
    return found


def _attention(flow: Flow, op: Op, window: int | None) -> Attention:
    graph, number = flow.graph, op.number
    qk, v = number("qk_dim"), number("v_dim")
    tokens = number("batch") * number("kv_len")
    key, value = op.inputs[1], op.inputs[2]
    heads = number("kv_heads")
    kept = number("window") if window is None else window
    causal = bool(op.attr("causal")) or len(op.inputs) > 3
    latent = _latent(flow, key, value, heads * (qk + v))
    if not latent:
        k_heads = flow.narrowest(key) // (tokens * qk)
        v_heads = flow.narrowest(value) // (tokens * v)
        if 0 < k_heads < heads and heads % k_heads == 0:
            heads = max(k_heads, v_heads) if 0 < v_heads < heads else k_heads
        else:
            heads = _projected(flow, key, value, heads, qk, v)
    assert graph.tensor(key).numel
    return Attention(number("q_heads"), heads, qk, v, kept, latent, causal)


def _projected(flow: Flow, key: str, value: str, heads: int, qk: int, v: int) -> int:
    """Heads that the K and V projections have, where each has one of its own."""
    behind = flow.sources(key), flow.sources(value)
    if any(len(ops) != 1 for ops in behind) or behind[0] == behind[1]:
        return heads
    counts = (behind[0][0].number("n") // qk, behind[1][0].number("n") // v)
    fewer = counts[0] == counts[1] and 0 < counts[0] < heads
    return counts[0] if fewer and heads % counts[0] == 0 else heads


def _latent(flow: Flow, key: str, value: str, width: int) -> int:
    """Elements of the compressed entry that K and V are both computed from, or 0."""
    shared = set(flow.sources(key)) & set(flow.sources(value))
    for up in sorted(shared, key=lambda op: op.name):
        if up.kind is not OpKind.GEMM or up.number("k") >= flow.hidden:
            continue
        for down in flow.sources(flow.activations(up)[0]):
            narrow = down.kind is OpKind.GEMM and down.number("n") < width
            if narrow and down.number("n") >= up.number("k"):
                return down.number("n")
    return 0


def _state(flow: Flow, ops: tuple[Op, ...], attends: bool) -> int:
    """Elements of a short convolution's state in a layer without attention."""
    if attends:
        return 0
    total = 0
    for op in ops:
        if op.kind is OpKind.CONV and op.number("groups") > 1:
            kernel = op.attr("kernel")
            assert isinstance(kernel, tuple)
            total += op.number("co") * kernel[0]
    return total
