"""Scaled-dot-product attention: dims b, h (key-value heads), g (queries per head), q,
kv, e (query-key width), v (value width). The softmax couples kv, and both widths are
needed whole by every score and every output row."""

from __future__ import annotations

from passes.ir import Attr, OpKind
from passes.spaces.registry import (
    Call,
    Label,
    Labels,
    RuleMismatch,
    Shape,
    Spec,
    rule,
    space,
)


def _batch_labels(rank: int) -> list[str]:
    if rank > 6:
        raise RuleMismatch("attention of this rank")
    return ["b", "c", "f"][: rank - 3]


def attention(call: Call, causal: bool, dropout: float, mask: str = "") -> Spec:
    """q [b.., (h g), q, e], k [b.., h, kv, e], v [b.., h, kv, v] -> [b.., (h g), q, v].

    A 3-d query is [b, q, e] with one head.
    """
    q, k, v = call.ref("query"), call.ref("key"), call.ref("value")
    rank = q.rank
    if rank < 3 or k.rank != rank or v.rank != rank:
        raise RuleMismatch(f"attention over ranks {rank}, {k.rank} and {v.rank}")
    if rank == 3:
        head_q: list[Label] = ["b"]
        head_kv: list[Label] = ["b"]
        sizes: dict[str, int] = {}
    else:
        batch = _batch_labels(rank)
        heads, kv_heads = q.shape[-3], k.shape[-3]
        if heads % kv_heads:
            raise RuleMismatch(f"{heads} query heads for {kv_heads}")
        head_q = [*batch, ("h", "g")]
        head_kv = [*batch, "h"]
        sizes = {"h": kv_heads, "g": heads // kv_heads}
        if kv_heads == 1:
            head_kv = [*batch, None]
    sizes |= {"q": q.shape[-2], "kv": k.shape[-2], "e": q.shape[-1], "v": v.shape[-1]}
    inputs: dict[str, Labels] = {
        "query": [*head_q, "q", "e"],
        "key": [*head_kv, "kv", "e"],
        "value": [*head_kv, "kv", "v"],
    }
    if mask and call.has(mask):
        inputs[mask] = _mask(call.ref(mask).shape, head_q, sizes)
    attrs: dict[str, Attr] = {
        "causal": causal,
        "window": 0,
        "fused": True,
        "dropout": dropout,
    }
    extra: list[Labels] = []
    for shape in call.outputs[1:]:
        full = [*head_q, "q"]
        plausible = len(shape) == len(full) and shape[-1] == q.shape[-2]
        extra.append(full if plausible else [None] * len(shape))
    return space(
        call,
        OpKind.ATTENTION,
        inputs,
        [[*head_q, "q", "v"], *extra],
        coupled=["kv", "e", "v"],
        sizes=sizes,
        attrs=attrs,
    )


def _mask(shape: Shape, head: list[Label], sizes: dict[str, int]) -> list[Label]:
    full: list[Label] = [*head, "q", "kv"]
    labels = full[len(full) - len(shape) :]
    result: list[Label] = []
    for label, size in zip(labels, shape, strict=True):
        if isinstance(label, tuple):
            whole = sizes["h"] * sizes["g"]
            result.append(label if size == whole else None)
        else:
            result.append(None if size == 1 else label)
    return result


def _dropout(call: Call) -> float:
    value = call.args.get("dropout_p", 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0


@rule(
    "aten.scaled_dot_product_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._scaled_dot_product_attention_math",
)
def sdpa(call: Call) -> Spec:
    mask = "attn_bias" if "attn_bias" in call.args else "attn_mask"
    return attention(call, bool(call.args.get("is_causal")), _dropout(call), mask)


@rule("flex_attention")
def flex(call: Call) -> Spec:
    return attention(call, False, 0.0)
