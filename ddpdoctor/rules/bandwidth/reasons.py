"""What could explain a low bandwidth: variables, processors, the network, and paths in NCCL's own log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective, Reason
from ddpdoctor.model.launch import find_variable
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import count_of, grouped, rank_list
from ddpdoctor.rules.environment.gpus import is_board, is_data_center
from ddpdoctor.rules.network import export, find_setting, is_bridge, is_tunnel, label, network_ports, pick_gloo, words
from ddpdoctor.rules.variables import find_danger, find_wrong_value, read_context

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.model.bandwidth import Bench, Member, NcclLog
    from ddpdoctor.model.node import Fleet, Gpu, Interface, Load, Network, Node, NodeProcess
    from ddpdoctor.rules.network import Pick, Setting


class Effect(IntEnum):
    """How much a reason can explain, the most first. The factors come from the reason's source, or are our choice."""

    # Data takes another path that is several times slower: host memory instead of NVLink, TCP instead of RDMA.
    OTHER_WAY = 0
    LIMIT = 1  # part of the path carries less: a link with half of its lanes, ranks that take turns on a processor
    SHARED = 2  # other users take a part of it
    SMALL = 3  # worth some percent, or more for small messages
    CONTEXT = 4  # nothing is wrong: it explains what the figure measures


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A reason and how much it can explain."""

    effect: Effect
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchNode:
    """A node of the bench and the ranks on it."""

    node: Node
    members: tuple[Member, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, sorted."""
        return tuple(sorted(member.rank for member in self.members))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchView:
    """All data that reasons come from."""

    bench: Bench
    places: tuple[BenchNode, ...] = ()  # empty if the machines were not inspected

    @property
    def nccl(self) -> bool:
        """Whether NCCL was measured, not Gloo."""
        return self.bench.settings.backend == "nccl"

    @property
    def between_hosts(self) -> bool:
        """Whether data went from host to host."""
        return max(len(self.places), len({member.host for member in self.bench.members})) > 1

    @property
    def best_gb_s(self) -> float | None:
        """The highest bus bandwidth that was measured."""
        return max((one.busbw_gb_s for one in self.bench.results if one.busbw_gb_s is not None), default=None)

    def logs(self, place: BenchNode) -> tuple[NcclLog, ...]:
        """Return the NCCL logs of the ranks on a node."""
        return tuple(log for log in self.bench.nccl_logs if log.rank in place.ranks)


def view(bench: Bench, fleet: Fleet | None) -> BenchView:
    """Match ranks with machines. Machines without a rank of the bench are left out."""
    if fleet is None:
        return BenchView(bench=bench)
    found = (BenchNode(node=node, members=_members(bench, node, alone=len(fleet.nodes) == 1)) for node in fleet.nodes)
    return BenchView(bench=bench, places=tuple(place for place in found if place.members))


def _members(bench: Bench, node: Node, *, alone: bool) -> tuple[Member, ...]:
    """Return the ranks of a node. A single machine that was inspected without a launcher holds all ranks."""
    ranks = set(node.ranks)
    return tuple(member for member in bench.members if member.rank in ranks or (alone and not ranks))


def weigh(
    effect: Effect, place: BenchNode, text: str, source: str, *, fix: str = "", ranks: tuple[int, ...] = ()
) -> Weighed:
    """Return a reason on one machine, and the ranks that it concerns if not all."""
    return Weighed(
        effect=effect, reason=Reason(text=text, source=source, hosts=(place.node.host,), ranks=ranks, fix=fix)
    )


def order(found: Iterable[Weighed]) -> tuple[Reason, ...]:
    """Return the reasons, those that explain most first. The same reason on several hosts or ranks is merged."""
    drawn: dict[object, Reason] = {}
    for one in sorted(found, key=lambda weighed: weighed.effect):
        reason = one.reason
        former = drawn.setdefault((one.effect, reason.text, reason.source, reason.fix), reason)
        hosts = tuple(dict.fromkeys([*former.hosts, *reason.hosts]))
        ranks = tuple(sorted({*former.ranks, *reason.ranks}))
        drawn[one.effect, reason.text, reason.source, reason.fix] = replace(former, hosts=hosts, ranks=ranks)
    return tuple(drawn.values())


_Harm = tuple[Effect, str, str, "Setting"]  # how much a setting explains, in words, with its source


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableEffect:
    """What a variable affects."""

    effect: Effect
    inside: bool = True  # whether it affects data within a host
    between: bool = True  # whether it affects data between hosts
    gloo: bool = False


_SMALL = VariableEffect(effect=Effect.SMALL)
# Variables with a value that harms what the bench measures (the column ``danger`` of model/variables.tsv). The check
# ib-disabled covers NCCL_IB_DISABLE and NCCL_NET, except for what it leaves to nccl-conf.
DANGERS = {
    "NCCL_P2P_DISABLE": VariableEffect(effect=Effect.OTHER_WAY, between=False),
    "NCCL_P2P_LEVEL": VariableEffect(effect=Effect.OTHER_WAY, between=False),
    "NCCL_SHM_DISABLE": VariableEffect(effect=Effect.OTHER_WAY, between=False),
    "NCCL_ALGO": VariableEffect(effect=Effect.LIMIT),
    "NCCL_PROTO": VariableEffect(effect=Effect.LIMIT),
    "NCCL_NET_GDR_LEVEL": VariableEffect(effect=Effect.LIMIT, inside=False),
    "NCCL_MULTI_RANK_GPU_ENABLE": VariableEffect(effect=Effect.LIMIT),
    "TORCH_DISTRIBUTED_DEBUG": VariableEffect(effect=Effect.LIMIT, gloo=True),
    "TORCH_NCCL_NAN_CHECK": VariableEffect(effect=Effect.LIMIT),
    "NCCL_NVLS_ENABLE": VariableEffect(effect=Effect.SMALL, between=False),
    "CUDA_LAUNCH_BLOCKING": _SMALL,
    "TORCH_NCCL_BLOCKING_WAIT": _SMALL,
    "NCCL_CHECK_POINTERS": _SMALL,
    "NCCL_DEBUG": _SMALL,
}
CHANNEL_LIMITS = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_RINGS", "NCCL_MAX_CTAS")
# Our choice: on NVLink NCCL opens 12 channels (V100) or more; over a few network cards it may need no more than this.
FEW_CHANNELS = 8


def variable_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield variables with a value that slows the bench, for each rank that has it."""
    for place in view.places:
        for process in place.node.processes:
            ranks = () if process.rank is None else (process.rank,)
            for effect, text, source, setting in _judge(view, place, process):
                yield weigh(effect, place, text, source, fix=setting.removal, ranks=ranks)


def _judge(view: BenchView, place: BenchNode, process: NodeProcess) -> Iterator[_Harm]:
    measured = read_context(place.node, process)
    for name, bearing in DANGERS.items():
        setting, variable = find_setting(place.node, process, name), find_variable(name)
        bears = (bearing.inside and len(place.members) > 1) or (bearing.between and view.between_hosts)
        if setting is None or variable is None or not (bears and (view.nccl or bearing.gloo)):
            continue
        flaw = find_danger(variable, setting.value, measured)
        if flaw is not None:
            yield bearing.effect, flaw.summary, _source(setting), setting
    if view.nccl:
        yield from _few_channels(place, process)
        yield from _misread(place, process)
    if view.nccl and view.between_hosts:
        yield from _off_in_a_file(place, process)


def _off_in_a_file(place: BenchNode, process: NodeProcess) -> Iterator[_Harm]:
    setting, rdma = find_setting(place.node, process, "NCCL_IB_DISABLE"), known(place.node.rdma)
    if setting is None or setting.path is None or not setting.number or rdma is None:
        return
    ports = [label(device, port) for device, port in network_ports(place.node, rdma)]
    if ports:
        text = f"{setting} disables the RDMA network on {words(ports)}: NCCL will use TCP sockets"
        yield Effect.OTHER_WAY, text, _source(setting), setting


def _few_channels(place: BenchNode, process: NodeProcess) -> Iterator[_Harm]:
    for name in CHANNEL_LIMITS:
        setting = find_setting(place.node, process, name)
        if setting is not None and setting.number is not None and 0 < setting.number < FEW_CHANNELS:
            text = f"{setting}: NCCL can open at most {setting.number} channels, but normally opens 12 to 32 on NVLink"
            yield Effect.LIMIT, text, _source(setting), setting


def _misread(place: BenchNode, process: NodeProcess) -> Iterator[_Harm]:
    """Yield tuning values that NCCL misreads: it takes NCCL_BUFFSIZE=4M as 4 bytes."""
    measured = read_context(place.node, process)
    for name in process.variables:
        variable, setting = find_variable(name), find_setting(place.node, process, name)
        if variable is None or setting is None or (variable.component, variable.kind) != ("nccl", "tune"):
            continue
        flaw = find_wrong_value(variable, setting.value, measured)
        if flaw is not None:
            yield Effect.LIMIT, flaw.summary, "DD112 env-value", setting


def _source(setting: Setting) -> str:
    return f"DD115 nccl-conf ({setting.path})" if setting.path else "DD114 env-danger"


BUSY_CORES = 0.25  # our choice: a quarter of a processor; daemons briefly use less
STEAL_SHARE = 0.05  # our choice: a twentieth of the time in which a virtual machine wanted to run
# Drivers whose "powersave" is the normal governor and clocks up under load (Linux, admin-guide/pm/intel_pstate.rst and
# amd-pstate.rst). With all others it is the lowest clock.
SELF_CLOCKING = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
FOLDER = "/sys/devices/system/cpu"
SAVING = "power"  # the energy_performance_preference that prefers saving power over speed


def processor_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield reasons in the processors of each machine."""
    for place in view.places:
        load = known(place.node.load)
        yield from _crowded(place)
        if load is not None:
            yield from _busy(place, load)
            yield from _stolen(place, load)
            for one in load.governors:
                if one.name == "powersave" and one.driver not in SELF_CLOCKING:
                    effect, what = Effect.LIMIT, "stay at their lowest clock"
                elif one.name == "powersave" and one.preference == SAVING:
                    effect, what = Effect.SMALL, "prefer to save power, and raise their clock slowly"
                else:
                    continue
                preference = f", preference {one.preference}" if one.preference else ""
                words = f"governor {one.name} of {one.driver or 'an unknown driver'}{preference}"
                text = f"{count_of(one.cpus, 'CPU')} {what}: {words}"
                yield weigh(
                    effect, place, text, f"{FOLDER}/*/cpufreq", fix="sudo cpupower frequency-set -g performance"
                )


def _crowded(place: BenchNode) -> Iterator[Weighed]:
    """Yield a reason if a machine's ranks have fewer CPUs than there are ranks, by affinity or by quota."""
    cpus = {cpu for process in place.node.processes for cpu in process.cpus}
    limits = known(place.node.limits)
    quota = limits.cpu_quota if limits is not None else None
    ranks, given = len(place.members), min(len(cpus), quota or len(cpus))
    if not cpus or given >= ranks:
        return
    online = limits.cpus_online if limits is not None else len(cpus)
    of_all = f" of the machine's {online}" if online > len(cpus) else ""
    if given < len(cpus):
        text = f"{_ranks(ranks)} a quota of {given:.3g} CPUs: the kernel throttles all of them when it is used up"
        source = "cpu.max of the cgroup"
    else:
        own = count_of(len(cpus), "CPU")
        text = f"{_ranks(ranks)} {own}{of_all}: a collective waits for ranks that have no core"
        source = "sched_getaffinity"
    fix = (
        f"start at most {count_of(max(1, int(given)), 'rank')} here, or give them more CPUs: taskset, srun -c, docker "
        "run --cpus"
    )
    yield weigh(Effect.LIMIT, place, text, source, ranks=place.ranks, fix=fix)


def _busy(place: BenchNode, load: Load) -> Iterator[Weighed]:
    """Yield ranks whose CPUs are taken by other work. Ranks with the same CPUs are judged together."""
    groups = grouped((process.cpus, process) for process in place.node.processes)
    for cpus, processes in groups.items():
        taken = sum(one.share for one in load.busy if one.cpu in cpus)
        # If all ranks have the same CPUs, ranks that did not report have them too.
        count = len(place.members) if len(groups) == 1 else len(processes)
        if taken < BUSY_CORES or count + taken <= len(cpus):
            continue
        yield weigh(
            Effect.SHARED,
            place,
            f"other processes kept {taken:.1f} of {count_of(len(cpus), 'CPU')} busy ({rank_list(cpus, 'CPU')}), but "
            f"{count_of(count, 'rank')} {'needs' if count == 1 else 'need'} them too",
            "/proc/stat, while the ranks were idle",
            ranks=tuple(sorted(process.rank for process in processes if process.rank is not None)),
            fix="run `top -o %CPU` to find them; end leftover processes, or use an idle machine",
        )


def _stolen(place: BenchNode, load: Load) -> Iterator[Weighed]:
    if load.steal_share is None or load.steal_share < STEAL_SHARE:
        return
    text = f"the hypervisor took {load.steal_share:.0%} of this virtual machine's CPU time (steal)"
    fix = "request dedicated CPUs, or another machine"
    yield weigh(Effect.SHARED, place, text, "/proc/stat: steal, since the start", fix=fix)


def _ranks(count: int) -> str:
    return "1 rank has" if count == 1 else f"{count} ranks share"


SOURCE = "NCCL's log"
SOCKETS = "NET/Socket"
NVLS_RANKS = 3  # NCCL uses NVLink SHARP only from three GPUs per host on (src/transport/nvls.cc: gpuCount <= 2 returns)
# NVLink SHARP needs the third generation of NVSwitch or later, which came with Hopper.
NVLS_PARTS = ("H20", "H100", "H200", "H800", "B100", "B200", "B300", "GB200", "GB300")


def nccl_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield reasons in NCCL's choices, or nothing if NCCL was not measured or its log was not captured."""
    if not view.nccl:
        return
    for place in view.places:
        logs = view.logs(place)
        if view.between_hosts:
            yield from _sockets(place, logs)
            yield from _no_gdr(place, logs)
        if len(place.members) > 1:
            yield from _host_memory(place, logs)
        if len(place.members) >= NVLS_RANKS and Collective.ALL_REDUCE in view.bench.settings.collectives:
            yield from _no_nvls(place, logs)


def joined_by_nvlink(place: BenchNode) -> bool:
    """Return whether every GPU of the machine has an NVLink that is up."""
    gpus = _gpus(place)
    return bool(gpus) and all(any(link.active for link in gpu.nvlinks or ()) for gpu in gpus)


def _gpus(place: BenchNode) -> tuple[Gpu, ...]:
    gpus = known(place.node.gpus)
    return gpus.devices if gpus is not None else ()


def _sockets(place: BenchNode, logs: Iterable[NcclLog]) -> Iterator[Weighed]:
    """Yield ranks that send over TCP, and say whether something better is available."""
    those = [log for log in logs if log.network == "Socket" and (SOCKETS in log.transports or not log.transports)]
    if not those:
        return
    names = words([name for log in those for name in log.interfaces] or ["its log names no interface"])
    rdma = known(place.node.rdma)
    ports = network_ports(place.node, rdma) if rdma is not None else ()
    if ports:
        better = words([label(device, port) for device, port in ports])
        rate = ports[0][1].rate_text or ports[0][1].link_layer
        text = f"NCCL uses TCP to other hosts ({names}), although RDMA is up on {better} ({rate})"
        fix = "check NCCL_IB_DISABLE, NCCL_NET, NCCL_IB_HCA and, in a container, /dev/infiniband: ddpdoctor check-env"
        yield _weigh(Effect.OTHER_WAY, place, text, those, fix=fix)
    else:
        text = f"NCCL uses TCP to other hosts ({names}): no RDMA network is up here"
        yield _weigh(Effect.LIMIT, place, text, those)


def _no_gdr(place: BenchNode, logs: Iterable[NcclLog]) -> Iterator[Weighed]:
    """Yield ranks whose data goes through host memory to an RDMA card although the GPUs could avoid that."""
    those = [log for log in logs if any(_goes_through_memory(way) for way in log.transports)]
    if those and all(is_data_center(gpu) for gpu in _gpus(place)):
        way = next(way for way in those[0].transports if _goes_through_memory(way))
        text = f"NCCL does not use GPUDirect RDMA to other hosts ({way}): data goes through host memory"
        fix = "modprobe nvidia-peermem, or a kernel and driver with DMA-BUF; see peermem and acs-iommu of check-env"
        yield _weigh(Effect.LIMIT, place, text, those, fix=fix)


def _goes_through_memory(way: str) -> bool:
    return way.startswith("NET/") and way != SOCKETS and not way.endswith("/GDRDMA")


def _host_memory(place: BenchNode, logs: Iterable[NcclLog]) -> Iterator[Weighed]:
    """Yield ranks that reach other ranks of their host through host memory."""
    those = [log for log in logs if "SHM" in log.transports]
    if not those:
        return
    if joined_by_nvlink(place):
        text = "NCCL uses host memory (SHM) between GPUs of this host, although they have NVLink"
        fix = "check nvidia-smi topo -p2p n, and unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL"
        yield _weigh(Effect.OTHER_WAY, place, text, those, fix=fix)
    else:
        text = "NCCL uses host memory (SHM) between GPUs of this host, because they have no usable peer access"
        yield _weigh(Effect.LIMIT, place, text, those, fix="nvidia-smi topo -p2p r; see p2p and acs-iommu of check-env")


def _no_nvls(place: BenchNode, logs: Iterable[NcclLog]) -> Iterator[Weighed]:
    those = [log for log in logs if log.nvls is False]
    gpus = _gpus(place)
    if not those or not gpus or not all(_has_nvls(gpu) for gpu in gpus):
        return
    text = "NCCL does not use NVLink SHARP (NVLS), although these GPUs and switches support it: all-reduce uses a ring"
    fix = "systemctl status nvidia-fabricmanager; it needs a driver of CUDA 12.1 or later, and a virtual machine's host"
    yield _weigh(Effect.SMALL, place, text, those, fix=fix)


def _has_nvls(gpu: Gpu) -> bool:
    """Return whether a GPU supports NVLink SHARP and is behind switches that are set up."""
    part = any(part in gpu.name.replace("-", " ").split() for part in NVLS_PARTS)
    return part and is_board(gpu) and gpu.fabric_state == "completed"


def _weigh(effect: Effect, place: BenchNode, text: str, logs: Iterable[NcclLog], *, fix: str = "") -> Weighed:
    ranks = tuple(sorted(log.rank for log in logs))
    whole = "" if set(ranks) == set(place.ranks) else f"{rank_list(ranks)}: "
    return weigh(effect, place, whole + text, SOURCE, fix=fix, ranks=ranks)


GB_S_PER_MBIT_S = 1e6 / 8 / 1e9  # converts an interface's speed, which is in megabits per second
# Our choice: from half of what an interface can carry, the interface is the limit. TCP reaches 94 % of Ethernet's speed
# with packets of 1500 bytes; Gloo reaches less, because it waits between the steps of its ring.
FULL_SHARE = 0.5
SLOW_MBIT_S = 1000  # our choice: at a gigabit per second or less, an interface limits whatever was measured
MUCH_FASTER = 2
STACKED = ("bond", "team", "vlan")  # prefixes of interfaces that have no device of their own but a real speed
JUMBO_FROM_MBIT_S = 10_000
ETHERNET_MTU = 1500  # from 10 Gbit/s on, ESnet (fasterdata.es.net, "MTU issues") advises packets of 9000 bytes
# Bytes that the kernel subtracts from an interface's MTU before it picks the largest RDMA MTU that fits: GRH, UDP, BTH,
# XRC, AtomicETH and ICRC (iboe_get_mtu, include/rdma/ib_addr.h).
ROCE_HEADERS = 96
ROCE_SIZES = (4096, 2048, 1024, 512, 256)


def network_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield reasons in the interfaces, for the library that was measured."""
    if not view.nccl:
        gloo: list[Weighed] = []
        for place in view.places:
            network, names = known(place.node.network), known(place.node.names)
            if network is None:
                continue
            picks = pick_gloo(place.node.first, network, names.own if names is not None else None) or ()
            if view.between_hosts:
                gloo += _tcp(view, place, "Gloo", tuple(dict.fromkeys(pick.interface for pick in picks)), network)
            elif len(place.members) > 1:
                gloo.append(_loopback(place, picks))
        yield from gloo
    elif view.between_hosts:
        yield from _nccl(view)


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
    usable = [one for one in network.interfaces if one.running and one.addresses and not one.loopback]
    found = [one for one in usable if one not in used and not is_bridge(one.name) and not is_tunnel(one.name)]
    best = max(found, key=lambda one: _speed(one) or 0, default=None)
    most, faster = (
        speed_mbit_s * GB_S_PER_MBIT_S,
        (best if best is not None and (_speed(best) or 0) >= MUCH_FASTER * speed_mbit_s else None),
    )
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
