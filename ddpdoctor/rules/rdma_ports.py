"""Which RDMA ports NCCL would use, which of them form a training network, and which are peers of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.reading import NotRead, Unread, Why, need
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.nccl_list import NcclList, parse_nccl_list
from ddpdoctor.rules.settings import find_setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.node import Node, Rdma, RdmaDevice, RdmaPort

VERBS_LAYERS = frozenset({"InfiniBand", "Ethernet"})
"""Link layers that NCCL's own transport uses (ncclIbInitDevices). AWS's EFA has neither, and uses a plugin."""
NETWORK_GB_S = 100.0
"""Our choice: an Ethernet card that is slower, or alone, counts as the machine's everyday network card."""
NETWORK_CARDS = 2

Place = tuple[str, str, int]
"""What ports that should be alike have in common: the board, the function on its card, the port number on its
device."""


def each_port(rdma: Rdma) -> Iterator[tuple[RdmaDevice, RdmaPort]]:
    """Yield all ports with their devices."""
    for device in rdma.devices:
        for port in device.ports:
            yield device, port


def is_active(port: RdmaPort) -> bool:
    """Say whether data can pass; ACTIVE_DEFER is a link that recovers by itself."""
    return port.state in {"ACTIVE", "ACTIVE_DEFER"}


def label(device: RdmaDevice, port: RdmaPort) -> str:
    """Return "mlx5_0", or "mlx4_0:2" for a device with several ports."""
    return device.name if len(device.ports) == 1 else f"{device.name}:{port.port}"


def words(names: Sequence[str]) -> str:
    """Return "mlx5_0", "mlx5_0 and mlx5_1", or "mlx5_0, mlx5_1, mlx5_2 and 5 more", each name once."""
    return name_list(tuple(dict.fromkeys(names)))


def hca_filter(node: Node) -> NcclList:
    """Return what NCCL_IB_HCA of the node's first process allows: everything if it is not set."""
    setting = find_setting(node, node.first, "NCCL_IB_HCA")
    return parse_nccl_list(setting.value if setting is not None else "")


def chosen_ports(node: Node, rdma: Rdma) -> tuple[tuple[RdmaDevice, RdmaPort], ...]:
    """Return the ports that NCCL's own transport would use if they were up."""
    wanted = hca_filter(node)
    return tuple(
        (device, port)
        for device, port in each_port(rdma)
        if port.link_layer in VERBS_LAYERS and wanted.takes(device.name, port.port)
    )


def network_ports(node: Node, rdma: Rdma) -> tuple[tuple[RdmaDevice, RdmaPort], ...]:
    """Return the ports of a training network that are up.

    These are InfiniBand ports, several fast Ethernet cards, or what NCCL_IB_HCA names. A single Ethernet card counts as
    the machine's everyday card, however fast it is: most servers and many cloud machines have one.
    """
    up = [(device, port) for device, port in chosen_ports(node, rdma) if is_active(port)]
    fast = [device for device, port in up if (port.rate_gb_s or 0) >= NETWORK_GB_S]
    several = len({card(device) for device in fast}) >= NETWORK_CARDS
    named = hca_filter(node)
    return tuple(
        (device, port)
        for device, port in up
        if port.link_layer == "InfiniBand" or named.names(device.name) or (several and device in fast)
    )


def is_efa(device: RdmaDevice) -> bool:
    """Say whether it is an Elastic Fabric Adapter, which needs device files and memory as other adapters do."""
    return any(port.link_layer == "Unspecified" and is_active(port) for port in device.ports)


def card(device: RdmaDevice) -> str:
    """Return what the functions of one card have in common."""
    return device.bus_id.rpartition(".")[0] if device.bus_id else device.name


def place(device: RdmaDevice, port: RdmaPort) -> Place:
    """Return what is equal for ports that should be alike: second ports are compared only to second ports."""
    function = device.bus_id.rpartition(".")[2] if device.bus_id else device.name
    return device.board or device.name, function, port.port


def need_rdma(node: Node) -> Rdma:
    """Return the RDMA devices. Raises ``NotRead`` if torch uses none: it does so only by NCCL, which needs a GPU."""
    rdma, gpus = need(node.rdma), node.gpus
    if isinstance(gpus, Unread) and gpus.why is Why.ABSENT:
        raise NotRead(gpus)
    if not isinstance(gpus, Unread) and not gpus.devices and not gpus.init_error:
        raise NotRead(Unread(why=Why.NEEDLESS, reason="no GPU is usable here, and only NCCL uses RDMA"))
    return rdma
