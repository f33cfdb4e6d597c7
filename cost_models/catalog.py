"""Hardware by name: reads ``specs/gpu_*.json``, ``link_*.json``, ``net_*.json``.

Adding a GPU, a link or a network is adding one file; no code knows their names. Units
are in the keys, and ``source`` says where the numbers come from.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar, cast

from cost_models.errors import SpecError
from cost_models.records import (
    DeviceSpec,
    LinkKind,
    LinkSpec,
    NetworkKind,
    NetworkSpec,
)

Record = Mapping[str, Any]
_T = TypeVar("_T", DeviceSpec, LinkSpec, NetworkSpec)

_FORMS = {
    **dict.fromkeys(("SXM", "SXM2", "SXM3", "SXM4", "SXM5", "SXM6", "HGX"), "SXM"),
    **dict.fromkeys(("PCIE", "PCI"), "PCIE"),
    **{"NVL": "NVL", "OAM": "OAM", "GB": "GB"},
}
_MAKERS = {"NVIDIA", "TESLA", "GEFORCE", "RTX", "QUADRO", "AMD", "INSTINCT"}
_NOISE = {*_MAKERS, "TENSOR", "CORE", "GPU", "HBM2", "HBM2E", "HBM3", "HBM3E"}
_MEMORY = re.compile(r"(\d{1,4})(?:GI?B|G)?", re.ASCII)


@lru_cache(maxsize=1)
def _files() -> Mapping[str, Record]:
    folder = resources.files("cost_models") / "specs"
    found = (f for f in folder.iterdir() if f.name.endswith(".json"))
    return {f.name: json.loads(f.read_text("utf-8")) for f in sorted(found, key=_name)}


def _name(file: Any) -> str:
    return str(file.name)


def records(prefix: str) -> tuple[Record, ...]:
    """The contents of every spec file whose name starts with ``prefix``."""
    return tuple(r for name, r in _files().items() if name.startswith(prefix))


def _strings(record: Record, key: str) -> tuple[str, ...]:
    return tuple(cast("list[str]", record.get(key, [])))


def _source(record: Record) -> tuple[str, ...]:
    source = _strings(record, "source")
    if not source:
        raise SpecError("a spec file without its source", record.get("name"))
    return source


def device_from(r: Record) -> DeviceSpec:
    """A device from the contents of a ``gpu_*.json`` file."""
    return DeviceSpec(
        name=r["name"],
        arch=r["arch"],
        memory_bytes=r["memory_bytes"],
        hbm_bytes_per_s=r["hbm_bytes_per_s"],
        l2_bytes=r["l2_bytes"],
        sm_count=r["sm_count"],
        clock_hz=r["clock_hz"],
        peak_flops=tuple((str(k), float(v)) for k, v in r["peak_flops"].items()),
        launch_s=r["launch_s"],
        kernel_s=r["kernel_s"],
        price_per_hour=r.get("price_per_hour_usd"),
        aliases=_strings(r, "aliases"),
        source=_source(r),
        family=r["family"],
        form=r["form"],
        nominal_gb=r["nominal_memory_gb"],
        rank=r.get("rank", 0),
        node_gpus=r["node_gpus"],
        link=r["link"],
        network=r["network"],
    )


def link_from(r: Record) -> LinkSpec:
    """A link from the contents of a ``link_*.json`` file."""
    return LinkSpec(
        name=r["name"],
        kind=LinkKind(r["link_kind"]),
        bytes_per_s=r["bytes_per_s"],
        latency_s=r["latency_s"],
        p2p=r.get("p2p", True),
        nvls=r.get("nvls", False),
        source=_source(r),
        aliases=_strings(r, "aliases"),
        fit=r.get("fit", ""),
        bridge_size=r.get("bridge_gpus", 0),
        bridge=r.get("bridge_link", ""),
        pair_bytes_per_s=r.get("pair_bytes_per_s", 0.0),
    )


def network_from(r: Record) -> NetworkSpec:
    """A network from the contents of a ``net_*.json`` file."""
    return NetworkSpec(
        name=r["name"],
        kind=NetworkKind(r["network_kind"]),
        bytes_per_s=r["bytes_per_s"],
        latency_s=r["latency_s"],
        oversubscription=r.get("oversubscription", 1.0),
        source=_source(r),
        aliases=_strings(r, "aliases"),
        fit=r.get("fit", ""),
        port_bytes_per_s=r.get("port_bytes_per_s", 0.0),
        ports_per_node=r.get("ports_per_node", 0),
    )


def _table(specs: Iterable[_T]) -> Mapping[str, _T]:
    table: dict[str, _T] = {}
    for spec in specs:
        for key in {_fold(n) for n in (spec.name, *spec.aliases)}:
            if key in table:
                raise SpecError(
                    "two specs claim the same name", f"{spec.name}, {table[key].name}"
                )
            table[key] = spec
    return table


def _fold(name: str) -> str:
    return "".join(c for c in name.upper() if c.isalnum())


@lru_cache(maxsize=1)
def _devices() -> Mapping[str, DeviceSpec]:
    return _table(device_from(r) for r in records("gpu_"))


@lru_cache(maxsize=1)
def _links() -> Mapping[str, LinkSpec]:
    return _table(link_from(r) for r in records("link_"))


@lru_cache(maxsize=1)
def _networks() -> Mapping[str, NetworkSpec]:
    return _table(network_from(r) for r in records("net_"))


def _names(table: Mapping[str, _T]) -> tuple[str, ...]:
    return tuple(sorted({spec.name for spec in table.values()}))


def device_names() -> tuple[str, ...]:
    """Names of all known GPUs, sorted."""
    return _names(_devices())


def link_names() -> tuple[str, ...]:
    """Names of all known links inside a node, sorted."""
    return _names(_links())


def network_names() -> tuple[str, ...]:
    """Names of all known networks between nodes, sorted."""
    return _names(_networks())


def _nearest(name: str, table: Mapping[str, _T]) -> str:
    close = difflib.get_close_matches(_fold(name)[:64], table, n=12, cutoff=0.5)
    names = list(dict.fromkeys(table[key].name for key in close))[:4]
    if names:
        return "Nearest known: " + ", ".join(names)
    return "Known: " + ", ".join(_names(table))


def _shown(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")


def load_device(name: str) -> DeviceSpec:
    """The device that ``name`` means; SpecError with the nearest names otherwise.

    A name is a family, and in any order a form and a memory size: ``A100``,
    ``A100-40GB``, ``V100-PCIE-16GB``, ``NVIDIA H100 SXM5 80GB``, ``RTX4090``. What is
    left out is the family's default variant."""
    table = _devices()
    exact = table.get(_fold(name))
    if exact is not None:
        return exact
    found = [d for d in set(table.values()) if _matches(name, d)]
    if not found:
        raise SpecError("unknown GPU", _shown(name), _nearest(name, table))
    return min(found, key=lambda d: (d.rank, d.name))


def _matches(name: str, device: DeviceSpec) -> bool:
    """Whether the words of ``name`` are the family, form or memory of ``device``."""
    if len(name) > 64:
        return False
    families = {_fold(n) for n in (device.family, *device.aliases)}
    seen = False
    for word in re.split(r"[\s\-_/]+", name.upper().strip()):
        plain = word[3:] if word.startswith("RTX") and len(word) > 3 else word
        memory = _MEMORY.fullmatch(word)
        if {word, plain} & families and not seen:
            seen = True
        elif word in _FORMS:
            if _FORMS[word] != device.form:
                return False
        elif memory is not None:
            if int(memory[1]) != device.nominal_gb:
                return False
        elif word not in _NOISE:
            return False
    return seen


def load_link(name: str) -> LinkSpec:
    """The link called ``name``; SpecError with the nearest names otherwise."""
    table = _links()
    found = table.get(_fold(name))
    if found is None:
        raise SpecError("unknown link", _shown(name), _nearest(name, table))
    return found


def load_network(name: str) -> NetworkSpec:
    """The network called ``name``; SpecError with the nearest names otherwise."""
    table = _networks()
    found = table.get(_fold(name))
    if found is None:
        raise SpecError("unknown network", _shown(name), _nearest(name, table))
    return found
