"""Fitted constants of collectives, one ``specs/fit_*.json`` per link generation.

``benchmarks/fit/fit_collectives.py`` writes the files; each carries what it was fitted
on and the error that remained. A link's or network's ``fit`` names its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from cost_models.catalog import records
from cost_models.errors import SpecError


@dataclass(frozen=True, slots=True)
class Protocol:
    """One wire protocol of a collective library: alpha, hop, share of the link."""

    base_s: float  # before the first byte moves
    hop_s: float  # per ring step
    efficiency: float  # share of the link's bytes/s that payload gets


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Collectives over one kind of link, see ``collectives.py`` for the formulas."""

    name: str
    ll: Protocol  # low latency: flags inside 8-byte words
    ll128: Protocol  # flags inside 128-byte lines
    simple: Protocol  # memory fences around large chunks
    exchange: Protocol  # all-to-all, small messages
    exchange_simple: Protocol  # all-to-all, large messages
    p2p: Protocol  # one sender, one receiver
    nvls: Protocol  # reduction inside the switch; efficiency of algbw
    copy_bytes_per_s: float  # a rank's own share, from input to output buffer
    simple_from_bytes: float  # bytes per rank from which ``simple`` is chosen
    contention: tuple[tuple[int, float], ...] = ()  # ranks -> share of the link left
    source: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NetFit:
    """What a network adds to a collective that crosses nodes."""

    name: str
    base_s: float  # once per collective
    hop_s: float  # per crossing, beside the network's own latency
    low_efficiency: float  # share of the port in the low-latency protocols
    efficiency: float  # share of the port for large messages, both ways at once
    p2p_efficiency: float  # the same, one way
    source: tuple[str, ...] = ()


PROTOCOLS = ("ll", "ll128", "simple", "exchange", "exchange_simple", "p2p", "nvls")


def link_fit_from(record: Mapping[str, Any]) -> LinkFit:
    """A LinkFit from the contents of a ``fit_*.json`` file."""
    constants = record["constants"]
    protocols = {name: Protocol(**constants[name]) for name in PROTOCOLS}
    return LinkFit(
        name=record["name"],
        copy_bytes_per_s=constants["copy_bytes_per_s"],
        simple_from_bytes=constants["simple_from_bytes"],
        contention=tuple(
            (int(ranks), float(share))
            for ranks, share in constants.get("contention", [])
        ),
        source=tuple(record["source"]),
        **protocols,
    )


def net_fit_from(record: Mapping[str, Any]) -> NetFit:
    """A NetFit from the contents of a ``fit_*.json`` file."""
    names = [f.name for f in fields(NetFit) if f.name not in ("name", "source")]
    known = {
        n: float(record["constants"][n]) for n in names if n in record["constants"]
    }
    return NetFit(name=record["name"], source=tuple(record["source"]), **known)


@lru_cache(maxsize=1)
def _link_fits() -> Mapping[str, LinkFit]:
    found = (r for r in records("fit_") if r["kind"] == "link_fit")
    return {r["name"]: link_fit_from(r) for r in found}


@lru_cache(maxsize=1)
def _net_fits() -> Mapping[str, NetFit]:
    found = (r for r in records("fit_") if r["kind"] == "network_fit")
    return {r["name"]: net_fit_from(r) for r in found}


def load_link_fit(name: str) -> LinkFit:
    """The constants that a LinkSpec's ``fit`` names; SpecError if there are none."""
    try:
        return _link_fits()[name]
    except KeyError:
        raise SpecError(
            "a link without fitted constants",
            repr(name),
            "Known: " + ", ".join(sorted(_link_fits())),
        ) from None


def load_net_fit(name: str) -> NetFit:
    """The constants that a NetworkSpec's ``fit`` names; SpecError if there are none."""
    try:
        return _net_fits()[name]
    except KeyError:
        raise SpecError(
            "a network without fitted constants",
            repr(name),
            "Known: " + ", ".join(sorted(_net_fits())),
        ) from None


@lru_cache(maxsize=1)
def _issue_times() -> Mapping[str, float]:
    found = (r for r in records("fit_") if r["kind"] == "issue_fit")
    return {str(k): float(v) for r in found for k, v in r["constants"].items()}


def issue_time(method: str) -> float:
    """Seconds that a way of measuring adds to each call; 0 for one that adds none.

    nccl-tests keeps a queue of launches and adds nothing; a Python loop that waits for
    each call adds its launch and its wait."""
    for prefix, seconds in _issue_times().items():
        if method.startswith(prefix):
            return seconds
    return 0.0
