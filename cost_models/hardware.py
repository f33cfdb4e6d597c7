"""Devices, nodes, networks and clusters: frozen records read from ``specs/*.json``."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models._compat import StrEnum


class LinkKind(StrEnum):
    NVSWITCH = "nvswitch"
    NVLINK_MESH = "nvlink_mesh"  # hybrid cube mesh, bridges
    PCIE = "pcie"
    XGMI = "xgmi"


class NetworkKind(StrEnum):
    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"
    ETHERNET = "ethernet"
    NVLINK = "nvlink"  # NVL72: the rack is one NVLink domain
    NONE = "none"  # a single node


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One GPU. Peaks are dense FLOP/s per dtype name: ``fp32`` (CUDA cores), ``tf32``,
    ``fp16``, ``bf16``, ``fp8``, ``int8``, ``int4``, ``fp4``; a missing dtype is not
    supported. ``memory_bytes`` is what the driver reports as usable."""

    name: str
    arch: str  # volta, turing, ampere, ada, hopper, blackwell, cdna2, cdna3
    memory_bytes: int
    hbm_bytes_per_s: float
    l2_bytes: int
    sm_count: int
    clock_hz: float
    peak_flops: tuple[tuple[str, float], ...]
    launch_s: float  # host-side cost of one kernel in eager code
    kernel_s: float  # shortest time a kernel takes on the device
    price_per_hour: float | None = None  # US dollars, on demand
    aliases: tuple[str, ...] = ()
    source: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s for ``dtype``; raises SpecError if unsupported."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The link inside a node. Bandwidth is bytes/s per GPU and direction."""

    name: str
    kind: LinkKind
    bytes_per_s: float
    latency_s: float
    p2p: bool = True  # False: staged through the host
    nvls: bool = False  # in-switch reduction (NVLink SHARP)
    source: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """The network between nodes. Bandwidth is bytes/s per GPU and direction."""

    name: str
    kind: NetworkKind
    bytes_per_s: float
    latency_s: float
    oversubscription: float = 1.0
    source: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """``nodes`` equal nodes of ``gpus_per_node`` equal GPUs."""

    device: DeviceSpec
    link: LinkSpec
    nodes: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Node groups on one network. Most clusters have one group."""

    text: str  # as the user wrote it
    groups: tuple[NodeGroup, ...]
    network: NetworkSpec

    @property
    def num_gpus(self) -> int:
        return sum(g.nodes * g.gpus_per_node for g in self.groups)

    @property
    def device(self) -> DeviceSpec:
        """The device of a homogeneous cluster; the first group's otherwise."""
        return self.groups[0].device

    @property
    def gpus_per_node(self) -> int:
        return self.groups[0].gpus_per_node
