"""Reasons in the network interfaces for a low bandwidth: those that Gloo uses, and NCCL if it sends over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.reading import known
from ddpdoctor.rules.bandwidth.reasons import Effect, Weighed, weigh
from ddpdoctor.rules.interface_choice import export, is_bridge, is_tunnel, pick_gloo
from ddpdoctor.rules.rdma_ports import label, network_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Interface, Network
    from ddpdoctor.rules.bandwidth.reasons import BenchNode, BenchView
    from ddpdoctor.rules.interface_choice import Pick

GB_S_PER_MBIT_S = 1e6 / 8 / 1e9
"""Converts an interface's speed, which is in megabits per second."""
FULL_SHARE = 0.5
"""Our choice: from half of what an interface can carry, the interface is the limit. TCP reaches 94 % of Ethernet's
speed with packets of 1500 bytes; Gloo reaches less, because it waits between the steps of its ring."""
SLOW_MBIT_S = 1000
"""Our choice: at a gigabit per second or less, an interface limits whatever was measured."""
MUCH_FASTER = 2
STACKED = ("bond", "team", "vlan")
"""Prefixes of interfaces that have no device of their own but a real speed."""
JUMBO_FROM_MBIT_S = 10_000
ETHERNET_MTU = 1500
"""From 10 Gbit/s on, ESnet (fasterdata.es.net, "MTU issues") advises packets of 9000 bytes."""
ROCE_HEADERS = 96
"""Bytes that the kernel subtracts from an interface's MTU before it picks the largest RDMA MTU that fits: GRH, UDP,
BTH, XRC, AtomicETH and ICRC (iboe_get_mtu, include/rdma/ib_addr.h)."""
ROCE_SIZES = (4096, 2048, 1024, 512, 256)


def network_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield reasons in the interfaces, for the library that was measured."""
    if not view.nccl:
        yield from _gloo(view)
    elif view.between_hosts:
        yield from _nccl(view)


def _gloo(view: BenchView) -> Iterator[Weighed]:
    for place in view.places:
        network, names = known(place.node.network), known(place.node.names)
        if network is None:
            continue
        picks = pick_gloo(place.node.first, network, names.own if names is not None else None) or ()
        if view.between_hosts:
            yield from _tcp(view, place, "Gloo", tuple(dict.fromkeys(pick.interface for pick in picks)), network)
        elif len(place.members) > 1:
            yield _loopback(place, picks)


def _loopback(place: BenchNode, picks: tuple[Pick, ...]) -> Weighed:
    """Explain a figure of ranks on one host: the kernel uses loopback for any of the host's own addresses."""
    own = f", whose address {picks[0].ip} is this host's own" if picks and not picks[0].ip.is_loopback else ""
    name = picks[0].interface.name if picks else "loopback"
    return weigh(
        Effect.CONTEXT,
        place,
        f"all ranks are on one host: Gloo sends data through the kernel over {name}{own}, so this measures CPUs and "
        "memory, not a network",
        "GLOO_SOCKET_IFNAME, the host name's address",
    )


def _nccl(view: BenchView) -> Iterator[Weighed]:
    for place in view.places:
        network, logs = known(place.node.network), view.logs(place)
        if not logs or network is None:
            continue
        if any(log.network != "Socket" for log in logs):
            yield from _roce_mtu(place, network)
            continue
        names = {name for log in logs for name in log.interfaces}
        used = tuple(interface for interface in network.interfaces if interface.name in names)
        yield from _tcp(view, place, "NCCL", used, network)


def _tcp(
    view: BenchView, place: BenchNode, library: str, used: tuple[Interface, ...], network: Network
) -> Iterator[Weighed]:
    """Yield reasons in the interfaces over which a library sends from host to host."""
    for interface in used:
        if is_tunnel(interface.name):
            text = f"{library} uses {interface.name}, which looks like a VPN: it is slower than the underlying network"
            fix = f"{export(f'{library.upper()}_SOCKET_IFNAME', network)} on all hosts"
            yield weigh(Effect.OTHER_WAY, place, text, "/sys/class/net", fix=fix)
    yield from _slow(view, place, library, used, network)
    yield from _small_packets(place, library, used)


def _slow(
    view: BenchView, place: BenchNode, library: str, used: tuple[Interface, ...], network: Network
) -> Iterator[Weighed]:
    speeds = [_speed(interface) for interface in used]
    speed_mbit_s = sum(speed or 0 for speed in speeds)
    if not speeds or None in speeds:
        return
    most, faster = speed_mbit_s * GB_S_PER_MBIT_S, _faster(network, used, speed_mbit_s)
    full = view.best_gb_s is not None and view.best_gb_s >= FULL_SHARE * most
    if not full and speed_mbit_s > SLOW_MBIT_S and faster is None:
        return
    names = " and ".join(interface.name for interface in used)
    text = f"{library} uses {names}, {_gbit(speed_mbit_s)}: a host can send at most {most:.3g} GB/s"
    if full:
        text += f", and {view.best_gb_s:.3g} GB/s were measured"
    if faster is not None:
        text += f"; {faster.name} has {_gbit(faster.speed_mb_s or 0)}"
    fix = f"export {library.upper()}_SOCKET_IFNAME={faster.name} on all hosts" if faster is not None else ""
    yield weigh(Effect.LIMIT, place, text, "/sys/class/net/*/speed", fix=fix)


def _speed(interface: Interface) -> int | None:
    """Return the speed, or None for virtual interfaces such as veth, which report a made-up 10 Gbit/s."""
    if interface.virtual and not interface.name.startswith(STACKED) and "." not in interface.name:
        return None
    return interface.speed_mb_s


def _faster(network: Network, used: tuple[Interface, ...], speed_mbit_s: int) -> Interface | None:
    usable = [one for one in network.interfaces if one.running and one.addresses and not one.loopback]
    found = [one for one in usable if one not in used and not is_bridge(one.name) and not is_tunnel(one.name)]
    best = max(found, key=lambda one: _speed(one) or 0, default=None)
    return best if best is not None and (_speed(best) or 0) >= MUCH_FASTER * speed_mbit_s else None


def _small_packets(place: BenchNode, library: str, used: tuple[Interface, ...]) -> Iterator[Weighed]:
    for interface in used:
        speed = _speed(interface)
        if speed is None or speed < JUMBO_FROM_MBIT_S or interface.mtu > ETHERNET_MTU:
            continue
        text = (
            f"{library} uses {interface.name} ({_gbit(speed)}) with an MTU of {interface.mtu}: larger packets "
            "need less CPU time"
        )
        fix = f"ip link set dev {interface.name} mtu 9000 on all hosts, if the switches support it"
        yield weigh(Effect.SMALL, place, text, f"/sys/class/net/{interface.name}/mtu", fix=fix)


def _roce_mtu(place: BenchNode, network: Network) -> Iterator[Weighed]:
    """Yield RoCE ports whose packets are below RDMA's largest size because of their interface's MTU."""
    rdma = known(place.node.rdma)
    if rdma is None:
        return
    mtus = {interface.name: interface.mtu for interface in network.interfaces}
    small: dict[int, list[str]] = {}
    for device, port in network_ports(place.node, rdma):
        sizes = [mtus[name] for name in device.netdevs if name in mtus]
        if port.link_layer == "Ethernet" and sizes and min(sizes) - ROCE_HEADERS < ROCE_SIZES[0]:
            small.setdefault(min(sizes), []).append(label(device, port))
    for mtu, ports in small.items():
        size = next(size for size in ROCE_SIZES if size <= max(mtu - ROCE_HEADERS, ROCE_SIZES[-1]))
        over = ports[0] if len(ports) == 1 else f"{len(ports)} ports"
        text = f"RoCE sends {size}-byte packets over {over}, although 4096 bytes are possible: the MTU is {mtu}"
        fix = "set an MTU of at least 4200 on these interfaces on all hosts, and on the switches"
        yield weigh(Effect.SMALL, place, text, "/sys/class/net/*/mtu", fix=fix)


def _gbit(speed_mbit_s: int) -> str:
    return f"{speed_mbit_s / 1000:g} Gbit/s"
