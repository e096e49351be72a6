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
    from ddpdoctor.rules.network import Setting


class Effect(IntEnum):
    """How much a reason can explain, the most first. The factors come from the reason's source, or are our choice."""

    # Data takes another path that is several times slower: host memory instead of NVLink, TCP instead of RDMA.
    OTHER_WAY = 0
    LIMIT = 1  # part of the path carries less: a link with half of its lanes, ranks that take turns on a processor
    SHARED = 2  # other users take a part of it
    SMALL = 3  # worth some percent, or more for small messages
    CONTEXT = 4  # nothing is wrong: it explains what the figure measures


Weighed = tuple[Effect, Reason]  # how much a reason can explain


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

    def logs(self, place: BenchNode) -> tuple[NcclLog, ...]:
        """Return the NCCL logs of the ranks on a node."""
        return tuple(log for log in self.bench.nccl_logs if log.rank in place.ranks)


def view(bench: Bench, fleet: Fleet | None) -> BenchView:
    """Match ranks with machines. Machines without a rank of the bench are left out."""
    nodes = fleet.nodes if fleet is not None else ()
    places = []
    for node in nodes:
        ranks = set(node.ranks)
        # A single machine that was inspected without a launcher holds all ranks.
        has_all = not ranks and len(nodes) == 1
        members = tuple(member for member in bench.members if has_all or member.rank in ranks)
        if members:
            places.append(BenchNode(node=node, members=members))
    return BenchView(bench=bench, places=tuple(places))


def weigh(
    effect: Effect, place: BenchNode, text: str, source: str, *, fix: str = "", ranks: tuple[int, ...] = ()
) -> Weighed:
    """Return a reason on one machine, and the ranks that it concerns if not all."""
    return effect, Reason(text=text, source=source, hosts=(place.node.host,), ranks=ranks, fix=fix)


def order(found: Iterable[Weighed]) -> tuple[Reason, ...]:
    """Return the reasons, those that explain most first. The same reason on several hosts or ranks is merged."""
    drawn: dict[object, Reason] = {}
    for effect, reason in sorted(found, key=lambda weighed: weighed[0]):
        alike = (effect, reason.text, reason.source, reason.fix)
        former = drawn.setdefault(alike, reason)
        hosts = tuple(dict.fromkeys([*former.hosts, *reason.hosts]))
        ranks = tuple(sorted({*former.ranks, *reason.ranks}))
        drawn[alike] = replace(former, hosts=hosts, ranks=ranks)
    return tuple(drawn.values())


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
            for effect, text, setting, misread in _harms(view, place, process):
                source = f"DD115 nccl-conf ({setting.path})" if setting.path else "DD114 env-danger"
                source = "DD112 env-value" if misread else source
                yield weigh(effect, place, text, source, fix=setting.removal, ranks=ranks)


def _harms(view: BenchView, place: BenchNode, process: NodeProcess) -> Iterator[tuple[Effect, str, Setting, bool]]:
    """Yield how much a process's settings explain, in words, and whether NCCL misreads the value."""
    measured = read_context(place.node, process)
    for name, bearing in DANGERS.items():
        setting, variable = find_setting(place.node, process, name), find_variable(name)
        bears = (bearing.inside and len(place.members) > 1) or (bearing.between and view.between_hosts)
        if setting is None or variable is None or not (bears and (view.nccl or bearing.gloo)):
            continue
        flaw = find_danger(variable, setting.value, measured)
        if flaw is not None:
            yield bearing.effect, flaw.summary, setting, False
    if not view.nccl:
        return
    for name in CHANNEL_LIMITS:
        setting = find_setting(place.node, process, name)
        if setting is not None and setting.number is not None and 0 < setting.number < FEW_CHANNELS:
            text = f"{setting}: NCCL can open at most {setting.number} channels, but normally opens 12 to 32 on NVLink"
            yield Effect.LIMIT, text, setting, False
    for name in process.variables:
        variable, setting = find_variable(name), find_setting(place.node, process, name)
        if variable is None or setting is None or (variable.component, variable.kind) != ("nccl", "tune"):
            continue
        flaw = find_wrong_value(variable, setting.value, measured)
        if flaw is not None:  # NCCL takes NCCL_BUFFSIZE=4M as 4 bytes
            yield Effect.LIMIT, flaw.summary, setting, True
    setting, rdma = find_setting(place.node, process, "NCCL_IB_DISABLE"), known(place.node.rdma)
    if view.between_hosts and setting is not None and setting.path is not None and setting.number and rdma is not None:
        ports = [label(device, port) for device, port in network_ports(place.node, rdma)]
        if ports:
            text = f"{setting} disables the RDMA network on {words(ports)}: NCCL will use TCP sockets"
            yield Effect.OTHER_WAY, text, setting, False


BUSY_CORES = 0.25  # our choice: a quarter of a processor; daemons briefly use less
STEAL_SHARE = 0.05  # our choice: a twentieth of the time in which a virtual machine wanted to run
# Drivers whose "powersave" is the normal governor and clocks up under load (Linux, admin-guide/pm/intel_pstate.rst and
# amd-pstate.rst). With all others it is the lowest clock.
SELF_CLOCKING = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
SAVING = "power"  # the energy_performance_preference that prefers saving power over speed


def processor_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield reasons in the processors of each machine."""
    for place in view.places:
        load = known(place.node.load)
        yield from _crowded(place)
        if load is not None:
            yield from _busy(place, load)
            if load.steal_share is not None and load.steal_share >= STEAL_SHARE:
                text = f"the hypervisor took {load.steal_share:.0%} of this virtual machine's CPU time (steal)"
                fix = "request dedicated CPUs, or another machine"
                yield weigh(Effect.SHARED, place, text, "/proc/stat: steal, since the start", fix=fix)
            for governor in load.governors:
                if governor.name == "powersave" and governor.driver not in SELF_CLOCKING:
                    effect, what = Effect.LIMIT, "stay at their lowest clock"
                elif governor.name == "powersave" and governor.preference == SAVING:
                    effect, what = Effect.SMALL, "prefer to save power, and raise their clock slowly"
                else:
                    continue
                preference = f", preference {governor.preference}" if governor.preference else ""
                words = f"governor {governor.name} of {governor.driver or 'an unknown driver'}{preference}"
                text = f"{count_of(governor.cpus, 'CPU')} {what}: {words}"
                fix = "sudo cpupower frequency-set -g performance"
                yield weigh(effect, place, text, "/sys/devices/system/cpu/*/cpufreq", fix=fix)


def _crowded(place: BenchNode) -> Iterator[Weighed]:
    cpus = {cpu for process in place.node.processes for cpu in process.cpus}
    limits = known(place.node.limits)
    quota = limits.cpu_quota if limits is not None else None
    ranks, given = len(place.members), min(len(cpus), quota or len(cpus))
    if not cpus or given >= ranks:
        return
    online = limits.cpus_online if limits is not None else len(cpus)
    of_all = f" of the machine's {online}" if online > len(cpus) else ""
    who = "1 rank has" if ranks == 1 else f"{ranks} ranks share"
    if given < len(cpus):
        text = f"{who} a quota of {given:.3g} CPUs: the kernel throttles all of them when it is used up"
        source = "cpu.max of the cgroup"
    else:
        text = f"{who} {count_of(len(cpus), 'CPU')}{of_all}: a collective waits for ranks that have no core"
        source = "sched_getaffinity"
    most = count_of(max(1, int(given)), "rank")
    fix = f"start at most {most} here, or give them more CPUs: taskset, srun -c, docker run --cpus"
    yield weigh(Effect.LIMIT, place, text, source, ranks=place.ranks, fix=fix)


def _busy(place: BenchNode, load: Load) -> Iterator[Weighed]:
    """Yield ranks whose CPUs are taken by other work. Ranks with the same CPUs are judged together."""
    groups = grouped((process.cpus, process) for process in place.node.processes)
    for cpus, processes in groups.items():
        taken = sum(cpu.share for cpu in load.busy if cpu.cpu in cpus)
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


SOURCE = "NCCL's log"
SOCKETS = "NET/Socket"
NVLS_RANKS = 3  # NCCL uses NVLink SHARP only from three GPUs per host on (src/transport/nvls.cc: gpuCount <= 2 returns)
# NVLink SHARP needs the third generation of NVSwitch or later, which came with Hopper.
NVLS_PARTS = ("H20", "H100", "H200", "H800", "B100", "B200", "B300", "GB200", "GB300")


_Choice = tuple[Effect, set[int], str, str]  # how much it explains, the ranks, a text, and a fix


def nccl_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield reasons in NCCL's choices, or nothing if NCCL was not measured or its log was not captured."""
    for place in view.places if view.nccl else ():
        for effect, chosen_by, text, fix in (*_choices_between_hosts(view, place), *_choices_inside(view, place)):
            ranks = tuple(sorted(chosen_by))
            whole = "" if set(ranks) == set(place.ranks) else f"{rank_list(ranks)}: "
            yield weigh(effect, place, whole + text, SOURCE, fix=fix, ranks=ranks)


def _choices_between_hosts(view: BenchView, place: BenchNode) -> Iterator[_Choice]:
    if not view.between_hosts:
        return
    logs = view.logs(place)
    # Ranks that send over TCP, and whether something better is available
    those = [log for log in logs if log.network == "Socket" and (SOCKETS in log.transports or not log.transports)]
    if those:
        names = words([name for log in those for name in log.interfaces] or ["its log names no interface"])
        rdma = known(place.node.rdma)
        ports = network_ports(place.node, rdma) if rdma is not None else ()
        effect, why, fix = Effect.LIMIT, ": no RDMA network is up here", ""
        if ports:
            better = words([label(device, port) for device, port in ports])
            rate = ports[0][1].rate_text or ports[0][1].link_layer
            effect, why = Effect.OTHER_WAY, f", although RDMA is up on {better} ({rate})"
            where = "NCCL_IB_DISABLE, NCCL_NET, NCCL_IB_HCA and, in a container, /dev/infiniband"
            fix = f"check {where}: ddpdoctor check-env"
        yield effect, {log.rank for log in those}, f"NCCL uses TCP to other hosts ({names}){why}", fix
    # Ranks whose data goes through host memory to an RDMA card although the GPUs could avoid that
    ways = [
        (log.rank, way)
        for log in logs
        for way in log.transports
        if way.startswith("NET/") and way != SOCKETS and not way.endswith("/GDRDMA")
    ]
    if ways and all(is_data_center(gpu) for gpu in _gpus(place)):
        text = f"NCCL does not use GPUDirect RDMA to other hosts ({ways[0][1]}): data goes through host memory"
        fix = "modprobe nvidia-peermem, or a kernel and driver with DMA-BUF; see peermem and acs-iommu of check-env"
        yield Effect.LIMIT, {rank for rank, _ in ways}, text, fix


def _choices_inside(view: BenchView, place: BenchNode) -> Iterator[_Choice]:
    logs, gpus = view.logs(place), _gpus(place)
    # Ranks that reach other ranks of their host through host memory
    ranks = {log.rank for log in logs if "SHM" in log.transports}
    if ranks and len(place.members) > 1:
        effect, why = Effect.LIMIT, "because they have no usable peer access"
        fix = "nvidia-smi topo -p2p r; see p2p and acs-iommu of check-env"
        if joined_by_nvlink(place):
            effect, why = Effect.OTHER_WAY, "although they have NVLink"
            fix = "check nvidia-smi topo -p2p n, and unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL"
        yield effect, ranks, f"NCCL uses host memory (SHM) between GPUs of this host, {why}", fix
    # Ranks that do not use NVLink SHARP, although all GPUs support it and are behind switches that are set up
    ranks = {log.rank for log in logs if log.nvls is False}
    can_use_nvls = len(place.members) >= NVLS_RANKS and all(
        is_board(gpu)
        and gpu.fabric_state == "completed"
        and any(part in gpu.name.replace("-", " ").split() for part in NVLS_PARTS)
        for gpu in gpus
    )
    if ranks and gpus and can_use_nvls and Collective.ALL_REDUCE in view.bench.settings.collectives:
        why = "although these GPUs and switches support it: all-reduce uses a ring"
        needs = "a driver of CUDA 12.1 or later, and a virtual machine's host"
        fix = f"systemctl status nvidia-fabricmanager; it needs {needs}"
        yield Effect.SMALL, ranks, f"NCCL does not use NVLink SHARP (NVLS), {why}", fix


def joined_by_nvlink(place: BenchNode) -> bool:
    """Return whether every GPU of the machine has an NVLink that is up."""
    gpus = _gpus(place)
    return bool(gpus) and all(any(link.active for link in gpu.nvlinks or ()) for gpu in gpus)


def _gpus(place: BenchNode) -> tuple[Gpu, ...]:
    gpus = known(place.node.gpus)
    return gpus.devices if gpus is not None else ()


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
    for place in view.places:
        network, names, logs = known(place.node.network), known(place.node.names), view.logs(place)
        if network is None:
            continue
        if not view.nccl:
            picks = pick_gloo(place.node.first, network, names.own if names is not None else None) or ()
            if view.between_hosts:
                yield from _tcp(view, place, "Gloo", tuple(dict.fromkeys(pick.interface for pick in picks)), network)
            elif len(place.members) > 1:
                # The kernel uses loopback for any of the host's own addresses.
                is_own = picks and not picks[0].ip.is_loopback
                own = f", whose address {picks[0].ip} is this host's own" if is_own else ""
                name = picks[0].interface.name if picks else "loopback"
                way = f"Gloo sends data through the kernel over {name}{own}"
                text = f"all ranks are on one host: {way}, so this measures CPUs and memory, not a network"
                yield weigh(Effect.CONTEXT, place, text, "GLOO_SOCKET_IFNAME, the host name's address")
        elif logs and view.between_hosts:
            if any(log.network != "Socket" for log in logs):
                yield from _roce_mtu(place, network)
            else:
                used = {name for log in logs for name in log.interfaces}
                cards = tuple(interface for interface in network.interfaces if interface.name in used)
                yield from _tcp(view, place, "NCCL", cards, network)


def _tcp(
    view: BenchView, place: BenchNode, library: str, used: tuple[Interface, ...], network: Network
) -> Iterator[Weighed]:
    for interface in used:
        if is_tunnel(interface.name):
            text = f"{library} uses {interface.name}, which looks like a VPN: it is slower than the underlying network"
            fix = f"{export(f'{library.upper()}_SOCKET_IFNAME', network)} on all hosts"
            yield weigh(Effect.OTHER_WAY, place, text, "/sys/class/net", fix=fix)
    speeds = [_speed(interface) for interface in used]
    speed_mbit_s = sum(speed or 0 for speed in speeds)
    most_gb_s = speed_mbit_s * GB_S_PER_MBIT_S
    measured_gb_s = max(
        (result.busbw_gb_s for result in view.bench.results if result.busbw_gb_s is not None), default=None
    )
    full = measured_gb_s is not None and measured_gb_s >= FULL_SHARE * most_gb_s
    usable = [nic for nic in network.interfaces if nic.running and nic.addresses and not nic.loopback]
    others = [nic for nic in usable if nic not in used and not is_bridge(nic.name) and not is_tunnel(nic.name)]
    best = max(others, key=lambda other: _speed(other) or 0, default=None)
    faster = best if best is not None and (_speed(best) or 0) >= MUCH_FASTER * speed_mbit_s else None
    if speeds and None not in speeds and (full or speed_mbit_s <= SLOW_MBIT_S or faster is not None):
        names = " and ".join(interface.name for interface in used)
        text = f"{library} uses {names}, {_gbit(speed_mbit_s)}: a host can send at most {most_gb_s:.3g} GB/s"
        fix = ""
        if full:
            text += f", and {measured_gb_s:.3g} GB/s were measured"
        if faster is not None:
            text += f"; {faster.name} has {_gbit(faster.speed_mb_s or 0)}"
            fix = f"export {library.upper()}_SOCKET_IFNAME={faster.name} on all hosts"
        yield weigh(Effect.LIMIT, place, text, "/sys/class/net/*/speed", fix=fix)
    for interface, speed in zip(used, speeds, strict=True):
        if speed is None or speed < JUMBO_FROM_MBIT_S or interface.mtu > ETHERNET_MTU:
            continue
        card = f"{interface.name} ({_gbit(speed)})"
        text = f"{library} uses {card} with an MTU of {interface.mtu}: larger packets need less CPU time"
        fix = f"ip link set dev {interface.name} mtu 9000 on all hosts, if the switches support it"
        yield weigh(Effect.SMALL, place, text, f"/sys/class/net/{interface.name}/mtu", fix=fix)


def _speed(interface: Interface) -> int | None:
    """Return the speed, or None for virtual interfaces such as veth, which report a made-up 10 Gbit/s."""
    if interface.virtual and not interface.name.startswith(STACKED) and "." not in interface.name:
        return None
    return interface.speed_mb_s


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
