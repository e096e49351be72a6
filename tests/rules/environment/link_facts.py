"""PCI devices and RDMA devices for tables: healthy, changed by what a row says."""

from ddpdoctor.model.node import Gid, Pci, PciDevice, Rdma, RdmaDevice, RdmaPort
from ddpdoctor.model.reading import Unread, Why

H100, GEFORCE = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
ZEROS = {"link_downed": 0, "symbol_error": 0}
NO_RDMA = Unread(why=Why.ABSENT, reason="there is no RDMA device")


def pci_device(bus_id, **changes):
    return PciDevice(**{
        "bus_id": bus_id, "vendor": 0x10DE, "device": 0x2330, "device_class": 0x030200, "numa_node": 0,
        "local_cpus": (0, 1, 2, 3), "width": 16, "max_width": 16, "speed_gt_s": 32.0, "max_speed_gt_s": 32.0,
        "acs_redirect": None, "upstream": (), **changes,
    })  # fmt: skip


def bridge(bus_id, **changes):
    return pci_device(bus_id, **{
        "vendor": 0x1000, "device": 0xC030, "device_class": 0x060400, "local_cpus": (),
        "acs_redirect": False, **changes,
    })  # fmt: skip


def nic(bus_id, **changes):
    return pci_device(bus_id, **{"vendor": 0x15B3, "device": 0x1021, "device_class": 0x020700, **changes})


def pci(*devices, model=H100, **changes):
    gpus = tuple(one.bus_id for one in devices if one.device_class in {0x030200, 0x030000} and one.vendor == 0x10DE)
    return Pci(**{
        "devices": devices, "iommu": False, "iommu_passthrough": False, "virtual_machine": False,
        "nvidia_proc_gpus": gpus, "models": dict.fromkeys(gpus, model), "numa_nodes": 2, **changes,
    })  # fmt: skip


def port(device, **changes):
    state, phys = changes.pop("state", "ACTIVE/LinkUp").split("/")
    rate = changes.pop("rate", 400.0)
    return RdmaPort(**{
        "device": device, "port": 1, "state": state, "phys_state": phys, "link_layer": "InfiniBand",
        "rate_gb_s": rate, "gids": (), "counters": ZEROS, "counters_later": ZEROS,
        "rate_text": f"{rate:g} Gb/sec (4X NDR)", **changes,
    })  # fmt: skip


OF_DEVICE = ("name", "bus_id", "board", "firmware", "uverbs", "netdevs", "virtual_function", "ports")


def hca(number=0, **changes):
    """Return a card of one port; what is no field of the device is one of its port."""
    own = {name: changes.pop(name) for name in OF_DEVICE if name in changes}
    name = own.get("name", f"mlx5_{number}")
    return RdmaDevice(**{
        "name": name, "bus_id": f"0000:{0x10 + number:02x}:00.0", "board": "MT_0000000838", "firmware": "28.43.2026",
        "ports": (port(name, **changes),), "uverbs": f"uverbs{number}", "netdevs": (f"net{number}",), **own,
    })  # fmt: skip


def gid(index, kind="IPv4", version="RoCE v2", netdev="net0"):
    text = {
        "IPv4": "0000:0000:0000:0000:0000:ffff:0a10:0001",
        "IPv6": "2001:0db8:0000:0000:0000:0000:0000:0001",
        "link-local": "fe80:0000:0000:0000:5aa2:e1ff:fe00:0010",
    }[kind]
    return Gid(index=index, gid=text, type=version, netdev=netdev)


GIDS = (
    gid(0, "link-local", "IB/RoCE v1"), gid(1, "link-local"), gid(2, "IPv4", "IB/RoCE v1"), gid(3, "IPv4"),
)  # fmt: skip


def roce(number=0, *, gids=GIDS, **changes):
    return hca(number, **{"link_layer": "Ethernet", "gids": gids, **changes})


def rdma(*devices, **changes):
    devices = devices or tuple(hca(number) for number in range(4))
    files = tuple(device.uverbs for device in devices if device.uverbs)
    return Rdma(**{
        "devices": devices, "peermem": True, "dmabuf": True, "uverbs": files, "uverbs_denied": (), "rdma_cm": True,
        "ipc_lock": False, **changes,
    })  # fmt: skip
