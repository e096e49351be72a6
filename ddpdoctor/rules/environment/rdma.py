"""DD331 and DD333: RDMA ports that are down, and links that come and go."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.sides import grouped
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.rdma_ports import VERBS_LAYERS, card, each_port, hca_filter, is_active, label, place, words
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.links import Rdma, RdmaDevice, RdmaPort
    from ddpdoctor.model.node import Node
    from ddpdoctor.rules.nccl_list import NcclList

DARK_CARDS = 4
"""Our choice: one or two InfiniBand cards without a cable are spares, but nobody leaves four unplugged."""

WHY = {
    ("DOWN", "Polling"): "no signal from the other end: check the cable, its transceiver and the switch port",
    ("DOWN", "Disabled"): "the port is disabled, or its network interface is down",
    ("DOWN", "Sleep"): "the port is sleeping",
    ("INIT", "LinkUp"): "the cable works, but no subnet manager has configured the port",
    ("ARMED", "LinkUp"): "the subnet manager has not finished configuring the port",
}


@rule(
    "DD331",
    "ib-state",
    Severity.ERROR,
    "An RDMA port that training would use is down",
    group=CheckGroup.LINKS,
    needs=("rdma", "gpus", "conf_files"),
    reads="/sys/class/infiniband/*/ports/*/state and phys_state, NCCL_IB_HCA",
)
def check_ib_state(node: Node) -> Answer:
    """Report RDMA ports that should be up but are not."""
    rdma = need(node.rdma)
    wanted = hca_filter(node)
    ports = [(device, port) for device, port in each_port(rdma) if port.link_layer in VERBS_LAYERS]
    if not ports:
        return skipped("the RDMA devices here are neither InfiniBand nor Ethernet: NCCL needs a plugin for them")
    faults = grouped(
        ((port.state, port.phys_state, severity), (device, port))
        for device, port in ports
        if (severity := _fault(device, port, ports, wanted)) is not None
    )
    problems = [_down(*how, those) for how, those in faults.items()] or _dark(node, ports)
    up = [label(device, port) for device, port in ports if is_active(port)]
    return judged(problems, f"{len(up)} of {len(ports)} ports are active" + (f": {words(up)}" if up else ""))


def _fault(
    device: RdmaDevice, port: RdmaPort, ports: list[tuple[RdmaDevice, RdmaPort]], wanted: NcclList
) -> Severity | None:
    if is_active(port) or not wanted.takes(device.name, port.port) or device.virtual_function:
        return None
    if wanted.names(device.name) and not any(is_active(other) for other in device.ports):
        return Severity.ERROR
    alike = [other for one, other in ports if place(one, other) == place(device, port) and not one.virtual_function]
    up = sum(is_active(other) for other in alike)
    if up * 2 > len(alike):
        return Severity.ERROR
    return Severity.WARNING if up else None


def _down(state: str, phys: str, severity: Severity, those: list[tuple[RdmaDevice, RdmaPort]]) -> Problem:
    names = words([label(device, port) for device, port in those])
    are = "are" if len(those) > 1 else "is"
    why = WHY.get((state, phys), f"its link is {phys}")
    return Problem(
        summary=f"RDMA port{'s' if len(those) > 1 else ''} {names} {are} not active: {why}",
        evidence=(
            f"state {state or 'not known'}, physical state {phys or 'not known'}",
            "NCCL skips ports that are not ACTIVE, and reports this only with NCCL_DEBUG=INFO",
        ),
        fix=_mend(state, phys, *those[0]),
        severity=severity,
    )


def _mend(state: str, phys: str, device: RdmaDevice, port: RdmaPort) -> str:
    if state in {"INIT", "ARMED"}:
        return f"sminfo -C {device.name} -P {port.port}; if it finds none, start the subnet manager of the fabric"
    if port.link_layer == "Ethernet" and device.netdevs:
        return f"ip link set {device.netdevs[0]} up; then check the cable and the switch port"
    if phys == "Disabled":
        return f"enable the port (mlxlink -d {device.name} -a UP), or find out who disabled it"
    return f"reseat or replace the cable of {label(device, port)} and check the switch port: mlxlink -d {device.name}"


def _dark(node: Node, ports: list[tuple[RdmaDevice, RdmaPort]]) -> list[Problem]:
    """Report a machine on which all InfiniBand ports are down."""
    cards = {card(device) for device, port in ports if port.link_layer == "InfiniBand"}
    gpus = known(node.gpus)
    if any(is_active(port) for _, port in ports) or len(cards) < DARK_CARDS or gpus is None or not gpus.devices:
        return []
    states = words([f"{port.state}/{port.phys_state}" for _, port in ports])
    return [
        Problem(
            summary=f"None of the {len(cards)} InfiniBand cards has an active port: NCCL would use TCP sockets",
            evidence=(f"states: {states}",),
            fix="check the leaf switch and the subnet manager: ibstat; sminfo",
            severity=Severity.WARNING,
        )
    ]


@rule(
    "DD333",
    "ib-flap",
    Severity.WARNING,
    "An RDMA link is flapping or has errors",
    group=CheckGroup.LINKS,
    needs=("rdma",),
    reads="/sys/class/infiniband/*/ports/*/counters: link_downed and four error counters, twice half a second apart",
)
def check_ib_flap(node: Node) -> Answer:
    """Report links that went down since the counters were reset, or that fail right now."""
    rdma = need(node.rdma)
    ports = [(device, port) for device, port in each_port(rdma) if port.counters]
    if not ports:
        return skipped("no RDMA port has counters that can be read")
    problems = [problem for device, port in ports for problem in _flaps(device, port, rdma)]
    downed = [port.counters.get("link_downed", 0) for _, port in ports]
    return judged(problems, f"links of {len(ports)} ports went down {sum(downed)} times since their counters began")


def _flaps(device: RdmaDevice, port: RdmaPort, rdma: Rdma) -> list[Problem]:
    rising = {
        name: port.counters_later[name] - value
        for name, value in port.counters.items()
        if port.counters_later.get(name, value) > value
    }
    if rising:
        return [_rising(device, port, rising)]
    count = port.counters.get("link_downed", 0)
    others = [
        other.counters.get("link_downed", 0)
        for one, other in each_port(rdma)
        if one is not device and place(one, other) == place(device, port) and is_active(other)
    ]
    if not is_active(port) or count <= (median(others) if others else 0):
        return []
    return [_flapped(device, port, count, others)]


def _rising(device: RdmaDevice, port: RdmaPort, rising: dict[str, int]) -> Problem:
    down = "link_downed" in rising
    what = "went down during this check" if down else "has errors right now"
    return Problem(
        summary=f"The link of RDMA port {label(device, port)} {what}",
        evidence=tuple(f"{name} rose by {by} within half a second" for name, by in sorted(rising.items())),
        fix=_replace(device, port),
        severity=Severity.ERROR if down else Severity.WARNING,
    )


def _flapped(device: RdmaDevice, port: RdmaPort, count: int, others: list[int]) -> Problem:
    times = "once" if count == 1 else f"{count} times"
    errors = [f"{name} {value}" for name, value in sorted(port.counters.items()) if value and name != "link_downed"]
    peers = f"link_downed of its {len(others)} peers: {min(others)} to {max(others)}" if others else ""
    return Problem(
        summary=f"The link of RDMA port {label(device, port)} went down {times} since its counters began",
        evidence=tuple(filter(None, (f"link_downed {count}", peers, ", ".join(errors)))),
        fix=_replace(device, port),
    )


def _replace(device: RdmaDevice, port: RdmaPort) -> str:
    """Return the fix for a bad cable."""
    return (
        f"clean and reseat the cable of {label(device, port)}, and check the switch log; "
        f"perfquery -R -C {device.name} -P {port.port} resets the counters"
    )
