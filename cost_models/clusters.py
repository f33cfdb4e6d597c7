"""The grammar of a cluster: text, a dict or a file -> ClusterSpec.

    cluster := groups ["@" network] ("," key "=" value)*
    groups  := group ("+" group)*
    group   := [N "x"] device | nodes "x" gpus_per_node "x" device
             | nodes "nodes x" gpus_per_node "x" device
    network := a name (ib-400, efa-400, ethernet-25) or a bandwidth, with words that
               say its kind and what it is counted per: 100Gbps, 10Gbps ethernet,
               400Gb/s roce, 25GB/s per node

``64xA100`` is 8 nodes of 8: the device's file says how many GPUs its usual node has and
which link and network it comes with. Fewer GPUs than a node make one node. A bandwidth
is per GPU, except Ethernet's, which is one port that a node's GPUs share; ``per node``
and ``per gpu`` say otherwise. Keys: ``inter`` (network), ``intra`` (link), ``mem``,
``oversubscription``, ``price``; a dict also takes ``gpu``, ``num_gpus``, ``nodes``,
``gpus_per_node``. A file is JSON with such a dict, or YAML where PyYAML is installed.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cost_models.catalog import load_device, load_link, load_network
from cost_models.errors import SpecError
from cost_models.records import (
    ClusterSpec,
    DeviceSpec,
    LinkSpec,
    NetworkKind,
    NetworkSpec,
    NodeGroup,
)
from cost_models.units import GIB, fmt_bandwidth, parse_bandwidth, parse_bytes

MAX_GPUS = 10**6
_MAX_TEXT = 1000
_HOW = "Write it like 64xA100, 8x8xH100 or 16xA100-40GB@100Gbps"
_FLAGS = re.ASCII | re.IGNORECASE
_COUNT = re.compile(r"(\d+)\s*(nodes?|hosts?|servers?)?\s*(?:[x*]|of)\s*", _FLAGS)
_RATE = re.compile(r"[\d.]+(?:e\d+)?\s*[kmgtp]?i?b[a-z]*(?:\s*/\s*s[a-z]*)?", _FLAGS)
_KINDS = {
    **dict.fromkeys(("ethernet", "eth", "tcp", "gbe"), "ethernet-25"),
    **dict.fromkeys(("infiniband", "ib", "rdma"), "ib-200"),
    **{"roce": "roce-200", "efa": "efa-400"},
}
_KEYS = {
    **dict.fromkeys(("gpu", "device"), "gpu"),
    **dict.fromkeys(("num_gpus", "gpus", "count"), "num_gpus"),
    **dict.fromkeys(("nodes", "num_nodes"), "nodes"),
    **dict.fromkeys(("gpus_per_node", "per_node"), "gpus_per_node"),
    **dict.fromkeys(("mem", "memory"), "mem"),
    **dict.fromkeys(("inter", "network", "net"), "inter"),
    **dict.fromkeys(("intra", "link"), "intra"),
    "oversubscription": "oversubscription",
    **dict.fromkeys(("price", "price_per_hour"), "price"),
    "cluster": "cluster",
}

Options = dict[str, object]


def parse_cluster(
    cluster: str | os.PathLike[str] | Mapping[str, object] | ClusterSpec,
) -> ClusterSpec:
    """The cluster that a text, a dict, a path or a ready ClusterSpec describes.

    Raises SpecError, and nothing else, for whatever is not a cluster: unknown names
    come with the nearest known ones, counts with what would be right."""
    if isinstance(cluster, ClusterSpec):
        return cluster
    if isinstance(cluster, Mapping):
        return _from_mapping(cluster)
    if isinstance(cluster, os.PathLike):
        return _from_file(Path(cluster))
    if not isinstance(cluster, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError("a cluster is a text, a dict or a file", repr(cluster), _HOW)
    if cluster.strip().lower().endswith((".json", ".yaml", ".yml")):
        return _from_file(Path(cluster.strip()))
    return _from_text(cluster)


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _from_text(text: str) -> ClusterSpec:
    if len(text) > _MAX_TEXT:
        raise SpecError("a cluster's description is too long", _short(text), _HOW)
    head, *pairs = text.replace("\u00d7", "x").split(",")
    options: Options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SpecError("not a key=value", _short(pair.strip()), _HOW)
        _put(options, key, value.strip())
    head, at, network = head.partition("@")
    if at:
        _put(options, "inter", network.strip())
    return _build(text.strip(), _groups(head, options), options)


def _put(options: Options, key: str, value: object) -> None:
    known = _KEYS.get(key.strip().lower())
    if known is None:
        fix = "Known: " + ", ".join(sorted(set(_KEYS.values())))
        raise SpecError("unknown key of a cluster", _short(key.strip()), fix)
    if known in options:
        raise SpecError("a cluster's key is given twice", known, "Give it once")
    options[known] = value


def _from_file(path: Path) -> ClusterSpec:
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        fix = f"Check the path ({type(error).__name__})"
        raise SpecError(
            "can not read the cluster file", _short(str(path)), fix
        ) from None
    try:
        loaded = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except (ValueError, RecursionError) as error:
        fix = f"Check its syntax ({error})"
        raise SpecError("not a cluster file", _short(str(path)), fix) from None
    if isinstance(loaded, str):
        return _from_text(loaded)
    if not isinstance(loaded, Mapping):
        fix = 'Write a mapping, as {"gpu": "A100", "num_gpus": 64}'
        raise SpecError("a cluster file holds a mapping", _short(str(path)), fix)
    return _from_mapping(cast("Mapping[str, object]", loaded))


def _yaml(text: str) -> object:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        fix = "Install PyYAML (pip install pyyaml) or write the cluster as JSON"
        raise SpecError("a YAML file needs PyYAML", None, fix) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _from_mapping(mapping: Mapping[str, object]) -> ClusterSpec:
    options: Options = {}
    for key, value in mapping.items():
        _put(options, str(key), value)
    text = ", ".join(f"{k}={v}" for k, v in options.items())
    whole = options.pop("cluster", None)
    if whole is not None:
        base = _from_text(str(whole))
        return _build(text, base.groups, options, base.network)
    if "gpu" not in options:
        raise SpecError("a cluster without its GPU", _short(text), "Give gpu='A100'")
    name = str(options.pop("gpu"))
    device = _device(name, options.get("mem"))
    counts = {
        key: _count(options.pop(key), key)
        for key in ("num_gpus", "nodes", "gpus_per_node")
        if options.get(key) is not None
    }
    return _build(text, (_counted(device, counts),), options)


def _count(value: object, what: str) -> int:
    digits = str(value).strip()
    if not re.fullmatch(r"\d{1,7}", digits, re.ASCII) or int(digits) < 1:
        raise SpecError(f"{what} must be a whole number >= 1", _short(value), _HOW)
    if int(digits) > MAX_GPUS:
        raise SpecError(f"{what} is too large", digits, f"At most {MAX_GPUS}")
    return int(digits)


def _counted(device: DeviceSpec, counts: Mapping[str, int]) -> NodeGroup:
    """A group of nodes from those of num_gpus, nodes, gpus_per_node that are known."""
    total, nodes = counts.get("num_gpus"), counts.get("nodes")
    per_node = counts.get("gpus_per_node")
    if nodes is not None:
        if per_node is None:
            per_node = device.node_gpus if total is None else total // nodes
        if total is not None and nodes * per_node != total:
            raise SpecError(
                "num_gpus is not nodes x gpus_per_node",
                f"{total} and {nodes} x {per_node}",
                f"Give num_gpus={nodes * max(per_node, 1)}, or leave it out",
            )
        return _group(device, nodes, per_node)
    if total is None:
        return _group(device, 1, per_node or device.node_gpus)
    return _split(device, total, per_node)


def _split(device: DeviceSpec, total: int, per_node: int | None = None) -> NodeGroup:
    """``total`` GPUs in nodes of ``per_node``, or of the device's usual node size."""
    if device.node_gpus > 16 and per_node is None:  # an NVLink domain of many trays
        return _domains(device, total)
    size = per_node or device.node_gpus
    if total <= size:
        return _group(device, 1, total)
    if total % size:
        below, above = total // size * size, (total // size + 1) * size
        fix = (
            f"Use {below} or {above} GPUs, or say the shape as nodes x GPUs: "
            f"1x{total}x{device.name}"
        )
        what = f"{total} GPUs are not whole nodes of {size} {device.name}"
        raise SpecError(what, None, fix)
    return _group(device, total // size, size)


def _domains(device: DeviceSpec, total: int) -> NodeGroup:
    """NVLink domains as full as ``total`` allows, in trays of four GPUs."""
    most = device.node_gpus
    if total <= most:
        return _group(device, 1, total)
    for size in range(most - most % 4, most // 2 - 1, -4):
        if total % size == 0:
            return _group(device, total // size, size)
    above = -(-total // 64) * 64
    fix = f"Use {above} GPUs (domains of 64), or say domains x GPUs: 2x36x{device.name}"
    what = f"{total} GPUs do not fill NVLink domains of up to {most} {device.name}"
    raise SpecError(what, None, fix)


def _group(device: DeviceSpec, nodes: int, per_node: int) -> NodeGroup:
    if per_node < 1 or nodes * per_node > MAX_GPUS:
        fix = f"From 1 to {MAX_GPUS} GPUs"
        raise SpecError("no such number of GPUs", f"{nodes} x {per_node}", fix)
    return NodeGroup(device, load_link(device.link), nodes, per_node)


def _groups(head: str, options: Options) -> tuple[NodeGroup, ...]:
    for key in ("num_gpus", "nodes", "gpus_per_node", "gpu", "cluster"):
        if key in options:
            raise SpecError("the counts stand before the GPU's name", key, _HOW)
    return tuple(_parse_group(part, options) for part in head.split("+"))


def _parse_group(text: str, options: Options) -> NodeGroup:
    rest, counts, said_nodes = text.strip(), list[int](), False
    while (match := _COUNT.match(rest)) is not None:
        counts.append(_count(match[1], "a count"))
        said_nodes = said_nodes or match[2] is not None
        rest = rest[match.end() :]
        if len(counts) > 2:
            raise SpecError("too many counts before a GPU", _short(text.strip()), _HOW)
    if not rest:
        raise SpecError("no GPU named", _short(text.strip()), _HOW)
    device = _device(rest, options.get("mem"))
    if len(counts) == 2:
        return _trays(device, counts[0], counts[1])
    if said_nodes:
        return _group(device, counts[0], device.node_gpus)
    return _split(device, counts[0] if counts else 1)


def _trays(device: DeviceSpec, nodes: int, per_node: int) -> NodeGroup:
    """``nodes x per_node``; the four-GPU trays of one NVLink domain are one node."""
    if device.node_gpus > 16 and per_node <= 4 and nodes > 1:
        return _domains(device, nodes * per_node)
    return _group(device, nodes, per_node)


def _device(name: str, memory: object | None) -> DeviceSpec:
    """The device, with ``memory`` bytes where the user states them."""
    device = load_device(name)
    if memory is None:
        return device
    size = parse_bytes(_text_or_number(memory, "mem"))
    if size < 1 or size > 2**50:
        raise SpecError("no GPU has such a memory", _short(memory))
    for nominal in (round(size / 1e9), round(size / GIB)):
        try:
            found = load_device(f"{device.family} {device.form} {nominal}GB")
        except SpecError:
            continue
        return replace(found, memory_bytes=size)
    return replace(device, memory_bytes=size)


def _text_or_number(value: object, what: str) -> str | int | float:
    if isinstance(value, (str, int, float)):
        return value
    raise SpecError(f"{what} must be a text or a number", _short(value))


def _number(value: object, what: str) -> float:
    try:
        number = float(cast(str, value))
    except (TypeError, ValueError, OverflowError):
        raise SpecError(f"{what} must be a number", _short(value)) from None
    if not 0 < number < 1e9:
        raise SpecError(f"{what} must be positive", _short(value))
    return number


def _build(
    text: str,
    groups: tuple[NodeGroup, ...],
    options: Options,
    network: NetworkSpec | None = None,
) -> ClusterSpec:
    """Joins groups and options, and picks the network."""
    intra, price = options.get("intra"), options.get("price")
    if intra is not None:
        groups = tuple(replace(g, link=_link(intra, g.link)) for g in groups)
    if price is not None:
        cost = _number(price, "price")
        groups = tuple(
            replace(g, device=replace(g.device, price_per_hour=cost)) for g in groups
        )
    if sum(g.nodes * g.gpus_per_node for g in groups) > MAX_GPUS:
        raise SpecError("too many GPUs", _short(text), f"At most {MAX_GPUS}")
    per_node = max(g.gpus_per_node for g in groups)
    if options.get("inter") is not None:
        network = _network(_text_or_number(options["inter"], "inter"), per_node)
    elif sum(g.nodes for g in groups) == 1:
        network = load_network("none")
    elif network is None or network.kind is NetworkKind.NONE:
        usual = [load_network(g.device.network) for g in groups]
        network = min((_shared(n, per_node) for n in usual), key=_speed)
    factor = options.get("oversubscription")
    if factor is not None:
        network = replace(network, oversubscription=_number(factor, "oversubscription"))
    return ClusterSpec(text, groups, network)


def _speed(network: NetworkSpec) -> float:
    return network.bytes_per_s


def _link(value: object, usual: LinkSpec) -> LinkSpec:
    """A named link, or the usual one at another bandwidth."""
    value = _text_or_number(value, "intra")
    if isinstance(value, str) and _RATE.fullmatch(value.strip()) is None:
        return load_link(value)
    rate = parse_bandwidth(value)
    return replace(
        usual, name=f"{usual.name} at {fmt_bandwidth(rate)}", bytes_per_s=rate
    )


def _shared(network: NetworkSpec, per_node: int) -> NetworkSpec:
    """``network`` with its ports divided among the GPUs of a node."""
    if network.ports_per_node == 0:
        return network
    each = network.port_bytes_per_s * network.ports_per_node / per_node
    return replace(
        network,
        bytes_per_s=each,
        port_bytes_per_s=max(each, network.port_bytes_per_s),
    )


def _network(value: str | int | float, per_node: int) -> NetworkSpec:
    """The network that a name or a bandwidth with its words describes."""
    if not isinstance(value, str):
        return _at_rate(load_network("ib-200"), parse_bandwidth(value), False, per_node)
    match = _RATE.search(value)
    words = re.findall(r"[a-z]+", (_RATE.sub(" ", value, count=1)).lower())
    if match is None or not match[0].strip(". "):
        return _shared(load_network(value), per_node)
    kinds = [_KINDS[w] for w in words if w in _KINDS]
    unknown = [
        w for w in words if w not in {*_KINDS, "per", "node", "gpu", "a", "each"}
    ]
    if unknown or len(set(kinds)) > 1:
        named = _named(value)
        if named is not None:
            return _shared(named, per_node)
        fix = "Write a bandwidth and a kind: 100Gbps, 25Gbps ethernet, 400Gb/s roce"
        raise SpecError("not a network", _short(value), fix)
    base = load_network(kinds[0] if kinds else "ib-200")
    per_port = "node" in words or (
        base.kind is NetworkKind.ETHERNET and "gpu" not in words
    )
    return _at_rate(base, parse_bandwidth(match[0]), per_port, per_node)


def _named(value: str) -> NetworkSpec | None:
    try:
        return load_network(value)
    except SpecError:
        return None


def _at_rate(
    base: NetworkSpec, rate: float, per_port: bool, per_node: int
) -> NetworkSpec:
    """``base`` at ``rate`` bytes/s per GPU, or per node where ``per_port``."""
    name = f"{base.kind} {fmt_bandwidth(rate)} per {'node' if per_port else 'GPU'}"
    if per_port:
        ports = replace(base, name=name, port_bytes_per_s=rate, ports_per_node=1)
        return _shared(ports, per_node)
    return replace(
        base, name=name, bytes_per_s=rate, port_bytes_per_s=0.0, ports_per_node=0
    )
