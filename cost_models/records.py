"""Devices, links, networks and clusters: the frozen records of hardware."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models._compat import StrEnum
from cost_models.errors import SpecError


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
    family: str = ""  # the model without form and memory: A100
    form: str = ""  # SXM, PCIE, NVL, OAM, GB
    nominal_gb: int = 0  # the memory in the product's name
    rank: int = 0  # among a family's variants, the lowest rank is the default
    node_gpus: int = 8  # GPUs in the usual node (or NVLink domain) of this device
    link: str = ""  # name of the usual link inside a node
    network: str = ""  # name of the usual network between nodes

    def __post_init__(self) -> None:
        if min(self.memory_bytes, self.sm_count, self.node_gpus) < 1:
            raise SpecError("a device needs memory, SMs and a node size", self.name)
        rates = (self.hbm_bytes_per_s, self.clock_hz, *(p for _, p in self.peak_flops))
        if min(rates) <= 0:
            raise SpecError("a device's rates must be positive", self.name)

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s for ``dtype``; raises SpecError if unsupported."""
        for name, flops in self.peak_flops:
            if name == dtype:
                return flops
        known = ", ".join(name for name, _ in self.peak_flops)
        fix = f"It computes in {known}"
        raise SpecError(f"{self.name} does not compute in", dtype, fix)

    def supports(self, dtype: str) -> bool:
        """Whether ``dtype`` has a peak on this device."""
        return any(name == dtype for name, _ in self.peak_flops)


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
    aliases: tuple[str, ...] = ()
    fit: str = ""  # name of the fitted collective constants (specs/fit_*.json)
    bridge_size: int = 0  # GPUs that share an NVLink bridge; 0: no bridge
    bridge: str = ""  # name of the link inside a bridged set
    pair_bytes_per_s: float = 0.0  # between two GPUs alone, in a mesh; 0: all of it

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise SpecError("a link needs a bandwidth and a latency", self.name)


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """The network between nodes. Bandwidth is bytes/s per GPU and direction.

    One port carries ``port_bytes_per_s``. A node has one port per GPU unless
    ``ports_per_node`` says otherwise; then the GPUs of a node share its ports."""

    name: str
    kind: NetworkKind
    bytes_per_s: float
    latency_s: float
    oversubscription: float = 1.0
    source: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    fit: str = ""  # name of the fitted constants (specs/fit_*.json)
    port_bytes_per_s: float = 0.0  # 0: one port per GPU
    ports_per_node: int = 0  # 0: one port per GPU

    def __post_init__(self) -> None:
        none = self.kind is NetworkKind.NONE
        if self.bytes_per_s < 0 or (self.bytes_per_s == 0 and not none):
            raise SpecError("a network needs a bandwidth", self.name)
        if self.latency_s < 0 or self.oversubscription < 1:
            raise SpecError(
                "a network needs latency >= 0 and oversubscription >= 1", self.name
            )

    @property
    def flow_bytes_per_s(self) -> float:
        """Most that one GPU can send alone: a port."""
        return self.port_bytes_per_s or self.bytes_per_s


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """``nodes`` equal nodes of ``gpus_per_node`` equal GPUs."""

    device: DeviceSpec
    link: LinkSpec
    nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise SpecError(
                "a cluster needs at least one node and one GPU",
                f"{self.nodes} x {self.gpus_per_node}",
            )


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Node groups on one network. Most clusters have one group."""

    text: str  # as the user wrote it
    groups: tuple[NodeGroup, ...]
    network: NetworkSpec

    def __post_init__(self) -> None:
        if not self.groups:
            raise SpecError("a cluster needs at least one group of nodes", self.text)

    @property
    def num_gpus(self) -> int:
        return sum(g.nodes * g.gpus_per_node for g in self.groups)

    @property
    def num_nodes(self) -> int:
        return sum(g.nodes for g in self.groups)

    @property
    def device(self) -> DeviceSpec:
        """The device of a homogeneous cluster; the first group's otherwise."""
        return self.groups[0].device

    @property
    def link(self) -> LinkSpec:
        """The link of a homogeneous cluster; the first group's otherwise."""
        return self.groups[0].link

    @property
    def gpus_per_node(self) -> int:
        return self.groups[0].gpus_per_node

    @property
    def homogeneous(self) -> bool:
        """Whether every node has the same device, link and GPU count."""
        first = self.groups[0]
        return all(
            (g.device, g.link, g.gpus_per_node)
            == (first.device, first.link, first.gpus_per_node)
            for g in self.groups
        )
