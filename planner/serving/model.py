"""What serving needs to know of a language model, per layer.

A :class:`ServingModel` holds the products, attention and cached tensors of every kind
of layer, with how many layers are of that kind. It is read off a traced graph
(``extract.py``) or written from dimensions (``dims.py``); the prices and sizes of this
package know nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["column", "row", "none"]


@dataclass(frozen=True, slots=True)
class Product:
    """``tokens x k`` times ``k x n``, as engines run it (equal inputs fused).

    split: over tensor ranks, ``column`` divides n, ``row`` divides k and leaves
    partial sums, ``none`` is repeated on every rank. experts: weight matrices of that
    shape (1: dense); chosen: how many of them each token visits. kv: elements of n that
    are key or value heads, which may have to be repeated. head: runs on the last token
    alone and keeps 16-bit weights.
    """

    name: str
    n: int
    k: int
    split: Split
    experts: int = 1
    chosen: int = 1
    quantised: bool = True

    @property
    def elements(self) -> int:
        return self.n * self.k * self.experts


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention of a layer and what it caches for each token.

    window: keys that a query sees (0: all). latent: elements of a compressed entry that
    stands for K and V of all heads (0: K and V are cached per head); it is the same on
    every tensor rank.
    """

    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int = 0
    latent: int = 0
    causal: bool = True

    @property
    def cached(self) -> int:
        """Elements that one token leaves in the cache of the whole layer."""
        return self.latent or self.kv_heads * (self.qk_dim + self.v_dim)

    def cached_on_rank(self, tp: int) -> float:
        """Elements on one of ``tp`` ranks: heads divide (and repeat where there are
        fewer than ranks); a latent does not."""
        if self.latent:
            return self.latent
        heads = max(1, -(-self.kv_heads // tp))
        return heads * (self.qk_dim + self.v_dim)

    def tokens_kept(self, length: int) -> int:
        """Cached tokens of a sequence of ``length`` tokens."""
        return min(length, self.window) if self.window else length


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of layer. other: parameters beside the products (norms, biases).
    state_bytes: fixed per sequence (recurrent layers); ops: kernels in eager code."""

    products: tuple[Product, ...]
    attentions: tuple[Attention, ...] = ()
    other: int = 0
    state_elements: int = 0
    ops: int = 12


@dataclass(frozen=True, slots=True)
class ServingModel:
    """A decoder as a server runs it. ``layers``: (kind, count) in execution order.

    embedding: elements of the token and position tables; vocab x hidden is the head's
    product, whose elements are 0 in memory where it is tied to the embedding.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[tuple[Layer, int], ...]
    embedding: int
    tied: bool
    window_accounting: str = "traced"
    other: int = 0  # parameters outside of layers and tables (the last norm)

    @property
    def depth(self) -> int:
        return sum(count for _, count in self.layers)

    @property
    def head_elements(self) -> int:
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, tied tensors once."""
        inside = sum(
            (sum(p.elements for p in layer.products) + layer.other) * count
            for layer, count in self.layers
        )
        return inside + self.embedding + self.head_elements + self.other

    @property
    def attentions(self) -> tuple[tuple[Attention, int], ...]:
        return tuple((a, n) for layer, n in self.layers for a in layer.attentions)

    @property
    def active_parameters(self) -> int:
        """Parameters in the products that one token goes through."""
        return sum(
            p.n * p.k * p.chosen * count
            for layer, count in self.layers
            for p in layer.products
        )
