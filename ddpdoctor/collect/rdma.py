"""Reads RDMA devices with their ports, counters and addresses, and whether this process may use them."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.kernel import BUS_ID
from ddpdoctor.collect.software import read_driver
from ddpdoctor.model.node import Gid, Rdma, RdmaDevice, RdmaPort
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.collect.system import ReadingPlan, System


DEVICES = "/sys/class/infiniband"
FILES = "/dev/infiniband"
VERBS = "/sys/class/infiniband_verbs"

COUNTERS = ("link_downed", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors", "symbol_error")
COUNTER_LIMIT_S = 1.0  # needed because the card's firmware has to answer each counter
# Our choice: long enough to see a link that fails all the time, and short enough for a check before every job.
BETWEEN_READS_S = 0.5

PEER_MODULES = frozenset({"nvidia_peermem", "nv_peer_mem"})
# NCCL checks for these (src/transport/net_ib/gdr.cc).
PEER_FILES = (
    "/sys/module/nvidia_peermem",
    "/sys/kernel/mm/memory_peers/nv_mem",
    "/sys/kernel/mm/memory_peers/nv_mem_nc",
)
DMABUF_KERNEL = (5, 12)  # the first kernel whose RDMA core accepts other devices' memory (ib_umem_dmabuf_get)
CAP_IPC_LOCK = 14

Counters = dict[str, dict[str, int]]  # the counters of every port, by the port's folder


def read_rdma(system: System, plan: ReadingPlan, pause: Callable[[float], None] = time.sleep) -> Rdma:  # noqa: ARG001
    """Read all RDMA devices; if any port is up, read the error counters twice."""
    names = system.names(DEVICES)
    if not names:
        raise NotRead(Unread(why=Why.ABSENT, reason="there is no RDMA device"))
    ports = [(name, port) for name in names for port in system.names(f"{DEVICES}/{name}/ports") if port.isdecimal()]
    first = _read_counters(system, ports)
    later: Counters = {}
    if any(_worded(system, f"{DEVICES}/{name}/ports/{port}/state") == "ACTIVE" for name, port in ports):
        pause(BETWEEN_READS_S)
        later = _read_counters(system, ports)
    files = [name for name in system.names(FILES) if name.startswith("uverbs")]
    usable = [name for name in files if system.calls.readable(f"{FILES}/{name}")]
    modules = {line.split(" ", 1)[0] for line in system.text_or("/proc/modules").splitlines()}
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", system.text_or("/proc/self/status"), re.MULTILINE)
    # The kernel checks CAP_IPC_LOCK in the initial user namespace.
    whole = system.text_or("/proc/self/uid_map", "0 0 4294967295").split() == ["0", "0", "4294967295"]
    # Whether kernel and driver can give the HCA access to GPU memory, or None if that is unknown
    driver, is_open = read_driver(system)
    release = system.calls.kernel()
    version = re.match(r"(\d+)\.(\d+)", release)
    has_dmabuf: bool | None
    if driver is None or version is None:
        has_dmabuf = None
    elif not is_open:
        has_dmabuf = False
    elif (int(version[1]), int(version[2])) >= DMABUF_KERNEL:
        has_dmabuf = True
    else:
        # Red Hat's kernel 4.18 has the RDMA core of later kernels.
        has_dmabuf = None if ".el8" in release else False
    return Rdma(
        devices=tuple(_read_device(system, name, first, later) for name in names),
        peermem=bool(modules & PEER_MODULES) or any(system.exists(name) for name in PEER_FILES),
        dmabuf=has_dmabuf,
        uverbs=tuple(usable),
        uverbs_denied=tuple(name for name in files if name not in usable),
        rdma_cm=system.exists(f"{FILES}/rdma_cm"),
        ipc_lock=whole and bool(int(capabilities[1], 16) >> CAP_IPC_LOCK & 1) if capabilities else None,
    )


def _read_counters(system: System, ports: list[tuple[str, str]]) -> Counters:
    """Ask all ports in parallel; one that does not answer has no counters."""

    def read(folder: str) -> dict[str, int]:
        values = {counter: system.number_or_none(f"{folder}/counters/{counter}") for counter in COUNTERS}
        return {counter: value for counter, value in values.items() if value is not None}

    folders = [f"{DEVICES}/{name}/ports/{port}" for name, port in ports]
    replies = ask_side_by_side({folder: partial(read, folder) for folder in folders}, COUNTER_LIMIT_S)
    return {folder: reply.value or {} for folder, reply in replies.items()}


def _read_device(system: System, name: str, first: Counters, later: Counters) -> RdmaDevice:
    folder = f"{DEVICES}/{name}"
    bus_id = os.path.basename(os.path.realpath(system.path(f"{folder}/device")))  # noqa: PTH119 - only the name is needed
    ports = sorted(int(port) for port in system.names(f"{folder}/ports") if port.isdecimal())
    verbs = system.names(VERBS)
    return RdmaDevice(
        name=name, bus_id=bus_id if BUS_ID.fullmatch(bus_id) else None,
        board=system.text_or(f"{folder}/board_id") or None, firmware=system.text_or(f"{folder}/fw_ver") or None,
        ports=tuple(_read_port(system, name, port, first, later) for port in ports),
        uverbs=next((file for file in verbs if system.text_or(f"{VERBS}/{file}/ibdev") == name), None),
        netdevs=system.names(f"{folder}/device/net"), virtual_function=system.exists(f"{folder}/device/physfn"),
    )  # fmt: skip


def _read_port(system: System, device: str, number: int, first: Counters, later: Counters) -> RdmaPort:
    folder = f"{DEVICES}/{device}/ports/{number}"
    rate = system.text_or(f"{folder}/rate")
    rate_gb_s = re.match(r"(\d+(?:\.\d+)?) Gb/sec", rate)  # "400 Gb/sec (4X NDR)"
    gids = []
    for index in sorted(int(name) for name in system.names(f"{folder}/gids") if name.isdecimal()):
        gid = system.text_or(f"{folder}/gids/{index}")
        if gid.strip("0:"):  # a table has hundreds of empty entries, whose attributes cannot be read
            kind = system.text_or(f"{folder}/gid_attrs/types/{index}")
            netdev = system.text_or(f"{folder}/gid_attrs/ndevs/{index}") or None
            gids.append(Gid(index=index, gid=gid, type=kind, netdev=netdev))
    return RdmaPort(
        device=device, port=number, state=_worded(system, f"{folder}/state"),
        phys_state=_worded(system, f"{folder}/phys_state"),
        link_layer=system.text_or(f"{folder}/link_layer", "Unspecified"),
        rate_gb_s=float(rate_gb_s[1]) if rate_gb_s else None, gids=tuple(gids), counters=first.get(folder, {}),
        counters_later=later.get(folder, {}), rate_text=rate,
    )  # fmt: skip


def _worded(system: System, name: str) -> str:
    """Return "ACTIVE" for the file text "4: ACTIVE"."""
    number, colon, word = system.text_or(name).partition(": ")
    return word if colon else number
