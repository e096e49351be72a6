"""DD335 and DD339: variables that keep NCCL from using RDMA devices, or make it use the wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import Unread, Why, known, need
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.nccl_list import ListEntry, NcclList, parse_nccl_list
from ddpdoctor.rules.rdma_ports import VERBS_LAYERS, each_port, is_active, label, network_ports, words
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.settings import Setting, find_setting

if TYPE_CHECKING:
    from ddpdoctor.model.links import RdmaDevice, RdmaPort
    from ddpdoctor.model.node import Node

ABSENT = "there is no RDMA device"
Ports = list[tuple["RdmaDevice", "RdmaPort"]]


@rule(
    "DD335",
    "ib-hca-env",
    Severity.ERROR,
    "NCCL_IB_HCA matches missing devices, or more devices than intended",
    group=CheckGroup.LINKS,
    needs=("rdma", "gpus", "conf_files"),
    reads="NCCL_IB_HCA (also in NCCL's files), /sys/class/infiniband",
)
def check_ib_hca_env(node: Node) -> Answer:
    """Report a value of NCCL_IB_HCA that does not fit the RDMA devices of the machine."""
    setting = find_setting(node, node.first, "NCCL_IB_HCA")
    if isinstance(node.rdma, Unread):
        return _without_device(node, node.rdma, setting)
    if setting is None:
        return passed("NCCL_IB_HCA is not set: NCCL uses every active port")
    ports = [(device, port) for device, port in each_port(node.rdma) if port.link_layer in VERBS_LAYERS]
    if not ports:
        return skipped("the RDMA devices here are neither InfiniBand nor Ethernet: NCCL_IB_HCA does not apply to them")
    wanted = parse_nccl_list(setting.value)
    taken = [label(device, port) for device, port in ports if wanted.takes(device.name, port.port)]
    if not taken:
        return judged([_nothing(setting, wanted, ports)], f"{setting} matches no port")
    problems = [problem for entry in wanted.entries for problem in _entry_problems(setting, wanted, entry, ports)]
    return judged(problems, f"{setting} matches {len(taken)} of {len(ports)} ports: {words(taken)}")


def _without_device(node: Node, unread: Unread, setting: Setting | None) -> Answer:
    gpus = known(node.gpus)
    if setting is None or unread.why is not Why.ABSENT or gpus is None or not gpus.devices:
        need(node.rdma)
    problem = Problem(
        summary=f"{setting} names RDMA devices, but there are none here: NCCL will use TCP sockets",
        evidence=("/sys/class/infiniband is empty",),
        fix=f"give the container its RDMA devices (docker run --device=/dev/infiniband), or {setting.removal}"
        if setting is not None
        else "",
    )
    return judged([problem], ABSENT)


def _nothing(setting: Setting, wanted: NcclList, ports: Ports) -> Problem:
    names = [device.name for device, _ in ports]
    all_of_them = ",".join(dict.fromkeys(names))
    what = "excludes every RDMA device" if wanted.exclude else "matches no RDMA device"
    return Problem(
        summary=f"{setting} {what} of this machine: NCCL will use TCP sockets",
        evidence=(f"devices here: {words(names)}", *_second_mark(wanted)),
        fix=setting.removal if setting.path else f"export NCCL_IB_HCA=={all_of_them}",
        kind=setting.kind,
    )


def _second_mark(wanted: NcclList) -> tuple[str, ...]:
    return (
        (f"= and ^ are only allowed once, before the whole list, not in {words(wanted.marked)}",)
        if wanted.marked
        else ()
    )


def _entry_problems(setting: Setting, wanted: NcclList, entry: ListEntry, ports: Ports) -> list[Problem]:
    matched = [
        device.name for device, port in ports if wanted.matches(entry, device.name, port.port)
    ]  # one name for each port
    names = tuple(dict.fromkeys(matched))
    if not names:
        return [_stray(setting, wanted, entry, ports)]
    if wanted.exact or entry.name not in names or len(names) == 1:
        return []
    more = [name for name in names if name != entry.name and not wanted.names(name)]
    return [_too_many(setting, wanted, entry, more)] if more else []


def _stray(setting: Setting, wanted: NcclList, entry: ListEntry, ports: Ports) -> Problem:
    return Problem(
        summary=f"{entry} in {setting} matches no RDMA device of this machine",
        evidence=(f"devices here: {words([device.name for device, _ in ports])}", *_second_mark(wanted)),
        fix=f"remove {entry} from NCCL_IB_HCA, or find out why the device is missing: ls /sys/class/infiniband",
        severity=Severity.WARNING,
        kind=setting.kind,
    )


def _too_many(setting: Setting, wanted: NcclList, entry: ListEntry, more: list[str]) -> Problem:
    mark = "^=" if wanted.exclude else "="
    listed = ",".join(str(one) for one in wanted.entries)
    what = "excludes" if wanted.exclude else "takes"
    return Problem(
        summary=f"{entry} in {setting} also {what} {words(more)}: entries are prefixes of names",
        evidence=(f"use = before the list to match full names: {mark}{listed}",),
        fix=f"export NCCL_IB_HCA={mark}{listed}"
        if setting.path is None
        else f"in {setting.path}: NCCL_IB_HCA={mark}{listed}",
        severity=Severity.WARNING,
        kind=setting.kind,
    )


@rule(
    "DD339",
    "ib-disabled",
    Severity.WARNING,
    "A variable disables a working RDMA network",
    group=CheckGroup.LINKS,
    needs=("rdma", "conf_files"),
    reads="NCCL_IB_DISABLE and NCCL_NET (also in NCCL's files), /sys/class/infiniband/*/ports/*/state",
)
def check_ib_disabled(node: Node) -> Answer:
    """Report NCCL_IB_DISABLE=1, or NCCL_NET=Socket, on a machine with an RDMA network that is up."""
    rdma = need(node.rdma)
    setting = _off_switch(node)
    ports = network_ports(node, rdma)
    if setting is None:
        return passed("neither NCCL_IB_DISABLE nor NCCL_NET disables RDMA")
    if not ports:
        up = words([label(device, port) for device, port in each_port(rdma) if is_active(port)] or ["none"])
        return passed(f"{setting}, but no port is on a training network (active: {up})")
    names = words([label(device, port) for device, port in ports])
    problem = Problem(
        summary=f"{setting} disables this machine's RDMA network: NCCL will use TCP sockets",
        evidence=(f"active: {names}, {ports[0][1].rate_text or ports[0][1].link_layer}",),
        fix=setting.removal,
        kind=setting.kind,
    )
    return judged([problem], f"{setting}, and {len(ports)} ports are active")


def _off_switch(node: Node) -> Setting | None:
    disable = find_setting(node, node.first, "NCCL_IB_DISABLE")
    if disable is not None and disable.number:
        return None if disable.path else disable  # in a file it is for nccl-conf to say
    network = find_setting(node, node.first, "NCCL_NET")
    return network if network is not None and network.value.lower() == "socket" else None
