"""A serving model from its published dimensions, where no code of it is at hand."""

from __future__ import annotations

from dataclasses import dataclass

from planner.serving.model import Attention, Layer, Product, ServingModel


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: ``count`` experts of ``width``, ``chosen`` for each token, ``shared``
    width beside them; the first ``dense_layers`` layers have none."""

    count: int
    chosen: int
    width: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Compressed attention: ranks of the query and the key-value projections."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Linear-attention layers: ``every``-th layer keeps full attention."""

    every: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4


@dataclass(frozen=True, slots=True)
class Dims:
    """Dimensions of a decoder. gated: three MLP matrices, not two. windows: the window
    of each layer in a repeating pattern (0: full)."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    gated: bool = True
    tied: bool = False
    windows: tuple[int, ...] = (0,)
    experts: Experts | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    positions: int = 0  # learned position table
    biased: bool = False
    qk_norm: bool = False


def serving_model(d: Dims) -> ServingModel:
    """The model of ``d``: equal neighbours are one kind."""
    runs: list[tuple[Layer, int]] = []
    for index in range(d.layers):
        layer = _layer(d, index)
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return ServingModel(
        d.name,
        d.hidden,
        d.vocab,
        tuple(runs),
        (d.vocab + d.positions) * d.hidden,
        d.tied,
        other=d.hidden * (2 if d.biased else 1),
    )


def _layer(d: Dims, index: int) -> Layer:
    linear = d.recurrent is not None and (index + 1) % d.recurrent.every != 0
    products: list[Product] = []
    attentions: tuple[Attention, ...] = ()
    state = 0
    if linear:
        assert d.recurrent is not None
        r = d.recurrent
        keys, values = r.key_heads * r.key_dim, r.value_heads * r.value_dim
        products += [
            Product(
                "in", 2 * keys + 2 * values + 2 * r.value_heads, d.hidden, "column"
            ),
            Product("out", d.hidden, values, "row"),
        ]
        state = r.value_heads * r.key_dim * r.value_dim + (2 * keys + values) * r.conv
    elif d.latent is not None:
        m = d.latent
        products += [
            Product("qkv_down", m.q_rank + m.kv_rank + m.rope, d.hidden, "none"),
            Product("q_up", d.q_heads * (m.nope + m.rope), m.q_rank, "column"),
            Product("kv_up", d.q_heads * (m.nope + m.v_dim), m.kv_rank, "column"),
            Product("out", d.hidden, d.q_heads * m.v_dim, "row"),
        ]
        attentions = (
            Attention(
                d.q_heads,
                d.q_heads,
                m.nope + m.rope,
                m.v_dim,
                latent=m.kv_rank + m.rope,
            ),
        )
    else:
        window = d.windows[index % len(d.windows)]
        width = (d.q_heads + 2 * d.kv_heads) * d.head_dim
        products += [
            Product("qkv", width, d.hidden, "column"),
            Product("out", d.hidden, d.q_heads * d.head_dim, "row"),
        ]
        attentions = (Attention(d.q_heads, d.kv_heads, d.head_dim, d.head_dim, window),)
    products += _feed_forward(d, index)
    return Layer(tuple(products), attentions, _other(d, products), state)


def _feed_forward(d: Dims, index: int) -> list[Product]:
    e = d.experts
    ways = 2 if d.gated else 1
    if e is None or index < e.dense_layers:
        return [
            Product("up", ways * d.mlp, d.hidden, "column"),
            Product("down", d.hidden, d.mlp, "row"),
        ]
    found = [Product("router", e.count, d.hidden, "none", quantised=False)]
    found += [
        Product("up", ways * e.width, d.hidden, "column", e.count, e.chosen),
        Product("down", d.hidden, e.width, "row", e.count, e.chosen),
    ]
    if e.shared:
        found += [
            Product("shared_up", ways * e.shared, d.hidden, "column"),
            Product("shared_down", d.hidden, e.shared, "row"),
        ]
    return found


def _other(d: Dims, products: list[Product]) -> int:
    norms = d.hidden * (4 if d.biased else 2)
    biases = sum(p.n for p in products) if d.biased else 0
    latent = d.latent.q_rank + d.latent.kv_rank if d.latent is not None else 0
    return norms + biases + latent + (2 * d.head_dim if d.qk_norm else 0)
