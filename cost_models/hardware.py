"""Devices, nodes, networks and clusters: frozen records read from ``specs/*.json``.

The records are in ``records.py``, the files in ``catalog.py``, the grammar of a cluster
in ``clusters.py``; this module is the name that the rest of the project uses.
"""

from __future__ import annotations

from cost_models.catalog import device_names as device_names
from cost_models.catalog import link_names as link_names
from cost_models.catalog import load_device as load_device
from cost_models.catalog import load_link as load_link
from cost_models.catalog import load_network as load_network
from cost_models.catalog import network_names as network_names
from cost_models.clusters import MAX_GPUS as MAX_GPUS
from cost_models.clusters import parse_cluster as parse_cluster
from cost_models.records import ClusterSpec as ClusterSpec
from cost_models.records import DeviceSpec as DeviceSpec
from cost_models.records import LinkKind as LinkKind
from cost_models.records import LinkSpec as LinkSpec
from cost_models.records import NetworkKind as NetworkKind
from cost_models.records import NetworkSpec as NetworkSpec
from cost_models.records import NodeGroup as NodeGroup
