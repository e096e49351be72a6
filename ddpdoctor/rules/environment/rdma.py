"""DD331 to DD339: RDMA ports that are down, slow or unsteady, what it takes to use them, RoCE, and variables."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.launch import read_node_count
from ddpdoctor.model.reading import Unread, Why, known, need
from ddpdoctor.model.words import count_of, format_about, grouped, name_list
from ddpdoctor.rules import network as net
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped, unknown
from ddpdoctor.rules.majority import compare_nodes, describe, disagreement
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Fleet, Gid, Node, Rdma, RdmaDevice, RdmaPort


DARK_CARDS = 4  # our choice: one or two InfiniBand cards without a cable are spares, but nobody leaves four unplugged
WHY = {
    ("DOWN", "Polling"): "no signal from the other end: check the cable, its transceiver and the switch port",
    ("DOWN", "Disabled"): "the port is disabled, or its network interface is down",
    ("DOWN", "Sleep"): "the port is sleeping",
    ("INIT", "LinkUp"): "the cable works, but no subnet manager has configured the port",
    ("ARMED", "LinkUp"): "the subnet manager has not finished configuring the port",
}


@rule(
    "DD331", "ib-state", Severity.ERROR, "An RDMA port that training would use is down", group=CheckGroup.LINKS,
    needs=("rdma", "gpus", "conf_files"), reads="/sys/class/infiniband/*/ports/*/state and phys_state, NCCL_IB_HCA",
)  # fmt: skip
def check_ib_state(node: Node) -> Answer:
    """Report RDMA ports that should be up but are not."""
    rdma = need(node.rdma)
    wanted = net.hca_filter(node)
    ports = [(device, port) for device, port in net.each_port(rdma) if port.link_layer in net.VERBS_LAYERS]
    if not ports:
        return skipped("the RDMA devices here are neither InfiniBand nor Ethernet: NCCL needs a plugin for them")
    faults = grouped(
        ((port.state, port.phys_state, severity), (device, port))
        for device, port in ports
        if (severity := _fault(device, port, ports, wanted)) is not None
    )
    problems = [_down(*how, those) for how, those in faults.items()]
    cards = {net.card(device) for device, port in ports if port.link_layer == "InfiniBand"}
    is_dark = len(cards) >= DARK_CARDS and not any(net.is_active(port) for _, port in ports)
    gpus = known(node.gpus)
    if not problems and is_dark and gpus is not None and gpus.devices:
        summary = f"None of the {len(cards)} InfiniBand cards has an active port: NCCL would use TCP sockets"
        evidence = (f"states: {net.words([f'{port.state}/{port.phys_state}' for _, port in ports])}",)
        fix = "check the leaf switch and the subnet manager: ibstat; sminfo"
        problems.append(Problem(summary=summary, evidence=evidence, fix=fix, severity=Severity.WARNING))
    up = [net.label(device, port) for device, port in ports if net.is_active(port)]
    return judged(problems, f"{len(up)} of {len(ports)} ports are active" + (f": {net.words(up)}" if up else ""))


def _fault(
    device: RdmaDevice, port: RdmaPort, ports: list[tuple[RdmaDevice, RdmaPort]], wanted: net.NcclList
) -> Severity | None:
    if net.is_active(port) or not wanted.takes(device.name, port.port) or device.virtual_function:
        return None
    if wanted.names(device.name) and not any(net.is_active(other) for other in device.ports):
        return Severity.ERROR
    alike = [
        other for nic, other in ports if net.place(nic, other) == net.place(device, port) and not nic.virtual_function
    ]
    up = sum(net.is_active(other) for other in alike)
    if up * 2 > len(alike):
        return Severity.ERROR
    return Severity.WARNING if up else None


def _down(state: str, phys: str, severity: Severity, those: list[tuple[RdmaDevice, RdmaPort]]) -> Problem:
    names, many = net.words([net.label(device, port) for device, port in those]), len(those) > 1
    device, port = those[0]
    if state in {"INIT", "ARMED"}:
        fix = f"sminfo -C {device.name} -P {port.port}; if it finds none, start the subnet manager of the fabric"
    elif port.link_layer == "Ethernet" and device.netdevs:
        fix = f"ip link set {device.netdevs[0]} up; then check the cable and the switch port"
    elif phys == "Disabled":
        fix = f"enable the port (mlxlink -d {device.name} -a UP), or find out why it is disabled"
    else:
        cable = f"the cable of {net.label(device, port)}"
        fix = f"reseat or replace {cable} and check the switch port: mlxlink -d {device.name}"
    reason = WHY.get((state, phys), f"its link is {phys}")
    summary = f"RDMA port{'s' if many else ''} {names} {'are' if many else 'is'} not active: {reason}"
    seen = f"state {state or 'not known'}, physical state {phys or 'not known'}"
    evidence = (seen, "NCCL skips ports that are not ACTIVE, and reports this only with NCCL_DEBUG=INFO")
    return Problem(summary=summary, evidence=evidence, fix=fix, severity=severity)


@rule(
    "DD333", "ib-flap", Severity.WARNING, "An RDMA link is flapping or has errors", group=CheckGroup.LINKS,
    needs=("rdma",),
    reads="/sys/class/infiniband/*/ports/*/counters: link_downed and four error counters, twice half a second apart",
)  # fmt: skip
def check_ib_flap(node: Node) -> Answer:
    """Report links that went down since the counters were reset, or that fail right now."""
    rdma = need(node.rdma)
    ports = [(device, port) for device, port in net.each_port(rdma) if port.counters]
    if not ports:
        return skipped("no RDMA port has counters that can be read")
    problems = [problem for device, port in ports for problem in _flaps(device, port, rdma)]
    downed = [port.counters.get("link_downed", 0) for _, port in ports]
    return judged(problems, f"links of {len(ports)} ports went down {sum(downed)} times since their counters began")


def _flaps(device: RdmaDevice, port: RdmaPort, rdma: Rdma) -> Iterator[Problem]:
    name_of_port = net.label(device, port)
    fix = (
        f"clean and reseat the cable of {name_of_port}, and check the switch log; "
        f"perfquery -R -C {device.name} -P {port.port} resets the counters"
    )
    rising = {
        name: port.counters_later[name] - value
        for name, value in port.counters.items()
        if port.counters_later.get(name, value) > value
    }
    if rising:
        down = "link_downed" in rising
        what = "went down during this check" if down else "has errors right now"
        summary, severity = f"The link of RDMA port {name_of_port} {what}", Severity.ERROR if down else Severity.WARNING
        evidence = tuple(f"{name} rose by {by} within half a second" for name, by in sorted(rising.items()))
        yield Problem(summary=summary, evidence=evidence, fix=fix, severity=severity)
        return
    count = port.counters.get("link_downed", 0)
    others = [
        other.counters.get("link_downed", 0)
        for nic, other in net.each_port(rdma)
        if nic is not device and net.place(nic, other) == net.place(device, port) and net.is_active(other)
    ]
    if net.is_active(port) and count > (median(others) if others else 0):
        times = "once" if count == 1 else f"{count} times"
        errors = [f"{name} {value}" for name, value in sorted(port.counters.items()) if value and name != "link_downed"]
        peers = f"link_downed of its {len(others)} peers: {min(others)} to {max(others)}" if others else ""
        summary = f"The link of RDMA port {name_of_port} went down {times} since its counters began"
        evidence = tuple(filter(None, (f"link_downed {count}", peers, ", ".join(errors))))
        yield Problem(summary=summary, evidence=evidence, fix=fix)


GIB = 2**30
# Our choice: NCCL registers megabytes for every connection; below this a job on several nodes fails while it connects.
LITTLE_BYTES = GIB
# Our choice: this is enough. GPU memory does not count, and NCCL keeps far less in host memory.
ENOUGH_BYTES = 64 * GIB
NO_NETWORK = "no RDMA network is up here"


@rule(
    "DD336", "peermem", Severity.WARNING, "RDMA cards cannot access GPU memory directly", group=CheckGroup.LINKS,
    needs=("rdma", "gpus", "conf_files"),
    reads="/proc/modules, /sys/kernel/mm/memory_peers, /proc/driver/nvidia/version, the kernel's release",
)  # fmt: skip
def check_peermem(node: Node) -> Answer:
    """Report GPUs and RDMA cards that can exchange data only through host memory."""
    rdma = net.need_rdma(node)
    ports = net.network_ports(node, rdma)
    if not ports:
        return skipped(NO_NETWORK)
    gpus = known(node.gpus)
    if gpus is not None and gpus.devices and all("GeForce" in gpu.name for gpu in gpus.devices):
        return skipped("GeForce GPUs have no GPUDirect RDMA")
    if rdma.peermem or rdma.dmabuf:
        return passed("nvidia-peermem is loaded" if rdma.peermem else "kernel and driver support DMA-BUF")
    if rdma.dmabuf is None:
        return unknown("nvidia-peermem is not loaded, and it is unknown whether the driver supports DMA-BUF")
    why = "nvidia-peermem is not loaded and DMA-BUF is not possible, so data between nodes goes through host memory"
    network = f"RDMA network: {net.words([device.name for device, _ in ports])}"
    evidence = (network, "DMA-BUF needs kernel 5.12 or later and NVIDIA's open kernel modules")
    summary, fix = f"RDMA cards cannot access GPU memory: {why}", "modprobe nvidia-peermem (on the host)"
    return found(summary, "neither nvidia-peermem nor DMA-BUF", evidence=evidence, fix=fix)


@rule(
    "DD337", "memlock", Severity.ERROR, "The limit on locked memory is too low for RDMA", group=CheckGroup.LINKS,
    needs=("limits", "rdma", "gpus", "conf_files"),
    reads="RLIMIT_MEMLOCK, CAP_IPC_LOCK of this process, whether an RDMA network is up",
)  # fmt: skip
def check_memlock(node: Node) -> Answer:
    """Report a limit on locked memory that keeps NCCL from registering its buffers."""
    rdma = net.need_rdma(node)
    if not _devices(node, rdma):
        return skipped(NO_NETWORK)
    if not rdma.uverbs:
        return skipped("no RDMA device can be opened here; fix that first")
    limit = need(node.limits).memlock
    if limit is None:
        return unknown("RLIMIT_MEMLOCK could not be read")
    soft, hard = ("unlimited" if size is None else format_about(size) for size in (limit.soft, limit.hard))
    if limit.soft is None or limit.soft >= ENOUGH_BYTES:
        return passed(f"limit {soft}")
    if rdma.ipc_lock:
        return passed(f"limit {soft}, which does not apply: the process has CAP_IPC_LOCK")
    if limit.hard is None:
        unlock = "ulimit -l unlimited"
    elif "SLURM_JOB_ID" in node.first.variables:
        unlock = (
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf and LimitMEMLOCK=infinity for slurmd "
            "(systemctl edit slurmd)"
        )
    else:
        unlock = (
            "in a container, docker run --ulimit memlock=-1 …; otherwise: "
            "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf, and log in again"
        )
    summary = f"RDMA can lock only {soft} of memory: NCCL fails if it registers more"
    limits, severity = f"limit {soft}, hard limit {hard}", Severity.ERROR
    if limit.soft >= LITTLE_BYTES:
        severity = Severity.WARNING
    return found(summary, limits, evidence=(f"RLIMIT_MEMLOCK: soft {limits}",), fix=unlock, severity=severity)


def _devices(node: Node, rdma: Rdma) -> tuple[RdmaDevice, ...]:
    """Return the devices of the RDMA network, each once, and AWS's EFA, which needs device files and memory too."""
    efas = [
        device
        for device in rdma.devices
        if any(port.link_layer == "Unspecified" and net.is_active(port) for port in device.ports)
    ]
    return tuple(
        {device.name: device for device in (*(nic for nic, _ in net.network_ports(node, rdma)), *efas)}.values()
    )


@rule(
    "DD338", "uverbs", Severity.ERROR, "This process cannot open the RDMA devices", group=CheckGroup.LINKS,
    needs=("rdma", "gpus", "conf_files"), reads="/dev/infiniband/uverbs*, /sys/class/infiniband_verbs",
)  # fmt: skip
def check_uverbs(node: Node) -> Answer:
    """Report RDMA devices whose device file is missing or cannot be opened by this process."""
    rdma = net.need_rdma(node)
    devices = _devices(node, rdma)
    if not devices:
        return skipped(NO_NETWORK)
    shut = [device for device in devices if device.uverbs not in rdma.uverbs]
    wanted = net.hca_filter(node)
    asked = [device for device in shut if wanted.names(device.name) or device.uverbs in rdma.uverbs_denied]
    seen = f"{len(devices) - len(shut)} of {len(devices)} devices can be opened"
    if not shut or (len(shut) < len(devices) and not asked):
        return passed(seen)
    shut = asked if len(shut) < len(devices) else shut
    denied = [device for device in shut if device.uverbs in rdma.uverbs_denied]
    names = net.words([device.name for device in shut])
    files = net.words([f"/dev/infiniband/{device.uverbs}" for device in shut if device.uverbs] or ["/dev/infiniband"])
    what = "cannot be opened" if denied else ("are missing" if len(shut) > 1 else "is missing")
    if all(device.uverbs is None for device in shut):
        fix = "modprobe ib_uverbs (on the host)"
    elif denied:
        fix = (
            "ls -l /dev/infiniband; a container needs --device=/dev/infiniband, and a user needs a udev rule (mode "
            "0666)"
        )
    else:
        fix = (
            "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 …; "
            "in Kubernetes request the resource of the RDMA device plugin"
        )
    network, count = net.find_setting(node, node.first, "NCCL_NET"), read_node_count(node.first)
    is_wanted = net.find_setting(node, node.first, "NCCL_IB_HCA") is not None
    is_wanted = is_wanted or (network is not None and network.value.lower() == "ib")
    is_wanted = is_wanted or (count is not None and count.nodes > 1)
    summary = f"This process cannot use RDMA: {files} {what}, so NCCL falls back to TCP sockets"
    evidence = (f"RDMA devices in /sys/class/infiniband that are up: {names}",)
    return found(summary, seen, evidence=evidence, fix=fix, severity=Severity.ERROR if is_wanted else Severity.WARNING)


@rule(
    "DD332", "ib-rate", Severity.ERROR,
    "An RDMA port is slower than its peers, or a host has fewer RDMA devices than the others", group=CheckGroup.LINKS,
    needs=("rdma",), reads="/sys/class/infiniband/*/ports/*/rate and board_id, on every host",
)  # fmt: skip
def check_ib_rate(fleet: Fleet) -> Answer:
    """Report RDMA ports that run at a lower rate than those of the same model."""
    groups = grouped(
        ((net.place(device, port), port.link_layer), (node.host, device, port))
        for node, rdma in fleet.each(lambda node: node.rdma)
        for device, port in net.each_port(rdma)
        if net.is_active(port) and port.rate_gb_s and not device.virtual_function
    )
    problems = [problem for links in groups.values() for problem in _compare_rates(links, alone=len(fleet.nodes) == 1)]
    counts: list[tuple[Node, Counter[str] | None]] = []  # devices of each board, or None if that could not be read
    for node in fleet.nodes:
        devices = () if isinstance(node.rdma, Unread) else node.rdma.devices
        boards = Counter(device.board for device in devices if device.board and not device.virtual_function)
        is_lost = isinstance(node.rdma, Unread) and node.rdma.why is not Why.ABSENT
        counts.append((node, None if is_lost else boards))
    for board in sorted({board for _, count in counts for board in count or ()}):
        split = compare_nodes((node, None if count is None else count[board]) for node, count in counts)
        most = split.majority.value if split is not None and split.majority is not None else None
        if split is not None and most is not None and all(side.value <= most for side in split.minorities):
            summary = f"Hosts have different RDMA devices: {describe(split, f'{board} devices:')}"
            evidence = ("a missing device may have fallen off the bus, or its driver did not load",)
            fix = "compare lspci -d 15b3: and ibstat on these hosts, and look for mlx5 in dmesg"
            severity, hosts = Severity.WARNING, split.hosts
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix, severity=severity, hosts=hosts))
    if not groups and not problems:
        return passed("no RDMA port is active")
    rates = Counter(f"{port.rate_gb_s:g} Gb/s" for links in groups.values() for _, _, port in links)
    return judged(problems, "active ports: " + ", ".join(f"{count} at {rate}" for rate, count in rates.most_common()))


def _compare_rates(links: list[tuple[str, RdmaDevice, RdmaPort]], *, alone: bool) -> Iterator[Problem]:
    """Yield one problem for each rate that is below the expected one; ``links`` are active ports and their hosts."""
    counts = Counter(port.rate_gb_s or 0.0 for _, _, port in links)
    usual, number = counts.most_common(1)[0]
    sure = number * 2 > len(links)
    expected = usual if sure else max(counts)
    unsure = Severity.INFO if alone and links[0][2].link_layer == "Ethernet" else Severity.WARNING
    for rate in sorted(rate for rate in counts if rate < expected):
        slow = [link for link in links if link[2].rate_gb_s == rate]
        hosts, lone = tuple(dict.fromkeys(host for host, _, _ in slow)), len(slow) == 1
        names = net.words([net.label(device, port) for _, device, port in slow])
        where = "" if alone else f" on {name_list(hosts)}"
        yield Problem(
            summary=f"RDMA port{'' if lone else 's'} {names}{where} {'runs' if lone else 'run'} at {rate:g} Gb/s, but "
            f"{count_of(counts[expected], 'other')} of the same model at {expected:g} Gb/s",
            evidence=tuple(dict.fromkeys(f"rate: {port.rate_text}" for _, _, port in slow if port.rate_text)),
            fix=f"check the lanes and the cable (mlxlink -d {slow[0][1].name} -m), clean or replace the cable, and "
            "check the switch port",
            severity=Severity.ERROR if sure else unsure,
            confidence=Confidence.HIGH if sure else Confidence.LOW,
            hosts=hosts,
        )


MAPPED_IPV4 = "0000:0000:0000:0000:0000:ffff:"
LINK_LOCAL = "fe80:"
V1, V2 = "IB/RoCE v1", "RoCE v2"
PICKS_ITSELF = "since NCCL 2.21 it picks the entry itself"
Ports = tuple[tuple["RdmaDevice", "RdmaPort"], ...]


@rule(
    "DD334", "roce-gid", Severity.ERROR,
    "A RoCE port has no routable address, or NCCL_IB_GID_INDEX selects a wrong one", group=CheckGroup.LINKS,
    needs=("rdma", "conf_files"),
    reads="/sys/class/infiniband/*/ports/*/gids, gid_attrs/types and gid_attrs/ndevs, NCCL_IB_GID_INDEX",
)  # fmt: skip
def check_roce_gid(fleet: Fleet) -> Answer:
    """Report RoCE ports whose address (GID) cannot carry the traffic."""
    roce: list[tuple[Node, Ports]] = []
    problems: list[Problem] = []
    for node, rdma in fleet.each(lambda node: node.rdma):
        ports = tuple(
            (device, port)
            for device, port in net.chosen_ports(node, rdma)
            if port.link_layer == "Ethernet" and net.is_active(port) and not device.virtual_function
        )
        if ports:
            setting = _index(node)
            roce.append((node, ports))
            problems += _by_choice(node, ports, rdma) if setting is None else _by_index(node, ports, setting)
    if not roce:
        return skipped("no RDMA device has an active Ethernet port that NCCL would use")
    meanings = []
    for node, ports in roce:
        setting = _index(node)
        kinds = set()
        for _, port in ports if setting is not None else ():
            index = setting.number or 0 if setting is not None else 0
            gid = next((gid for gid in port.gids if gid.index == index), None)
            kinds.add("an empty entry" if gid is None else f"{gid.type or 'of unknown type'} {_kind(gid)}")
        meanings.append((node, kinds.pop() if len(kinds) == 1 else ("different kinds" if kinds else None)))
    split = compare_nodes(meanings)
    if split is not None:
        what = "NCCL_IB_GID_INDEX selects different address types on different hosts, which then cannot connect"
        fix = f"unset NCCL_IB_GID_INDEX on all hosts ({PICKS_ITSELF})"
        problems.append(disagreement(split, f"{what}: {describe(split, 'it is')}", fix))
    node, ports = roce[0]
    setting = _index(node)
    how = str(setting) if setting is not None else f"an entry that is {V2} with {_family(node)}"
    return judged(problems, f"{_words_of(ports)}: {how}" + f", on {len(roce)} hosts" * (len(roce) > 1))


def _words_of(ports: Ports) -> str:
    return net.words([net.label(device, port) for device, port in ports])


def _index(node: Node) -> net.Setting | None:
    """Return NCCL_IB_GID_INDEX if it has an effect. With -1 or text that is not a number, NCCL chooses by itself."""
    setting = net.find_setting(node, node.first, "NCCL_IB_GID_INDEX")
    return setting if setting is not None and (setting.number if setting.number is not None else -1) >= 0 else None


def _family(node: Node) -> str:
    setting = net.find_setting(node, node.first, "NCCL_IB_ADDR_FAMILY")
    return "IPv6" if setting is not None and setting.value == "AF_INET6" else "IPv4"


def _kind(gid: Gid) -> str:
    if gid.gid.lower().startswith(MAPPED_IPV4):
        return "IPv4"
    return "link-local" if gid.gid.lower().startswith(LINK_LOCAL) else "IPv6"


def _routes(port: RdmaPort, family: str) -> bool:
    return any(gid.type == V2 and _kind(gid) == family for gid in port.gids)


def _by_choice(node: Node, ports: Ports, rdma: Rdma) -> Iterator[Problem]:
    """Report ports on which NCCL would find no usable entry by itself."""
    family = _family(node)
    bare = tuple((device, port) for device, port in ports if not _routes(port, family))
    if not bare:
        return
    training = {id(port) for _, port in net.network_ports(node, rdma)}
    severity = Severity.ERROR if any(id(port) in training for _, port in bare) else Severity.INFO
    device = bare[0][0]
    interface = device.netdevs[0] if device.netdevs else "INTERFACE"
    kinds = sorted({f"{gid.type} {_kind(gid)}" for _, port in bare for gid in port.gids})
    lacks = f"{_words_of(bare)} {'has' if len(bare) == 1 else 'have'} no RoCE v2 address with {family}"
    summary = f"{lacks}: NCCL uses a link-local one, which cannot reach other network segments"
    add = f"give the interface its address (ip addr add ADDRESS/PREFIX dev {interface})"
    evidence, fix = (f"entries in use: {', '.join(kinds) or 'none'}",), f"{add}, or exclude the port with NCCL_IB_HCA"
    yield Problem(summary=summary, evidence=evidence, fix=fix, severity=severity, hosts=(node.host,))


def _by_index(node: Node, ports: Ports, setting: net.Setting) -> Iterator[Problem]:
    judged_ports = ((_entry_fault(port, setting.number or 0), (device, port)) for device, port in ports)
    faults = grouped((fault, port) for fault, port in judged_ports if fault is not None)
    good = [{gid.index for gid in port.gids if gid.type == V2 and _kind(gid) == "IPv4"} for _, port in ports]
    common = set.intersection(*good)
    right = "no entry is RoCE v2 with IPv4 on all ports"
    if common:
        right = f"RoCE v2 with IPv4 is entry {min(common)} on all {len(ports)} ports"
    for (what, severity), those in faults.items():
        summary = f"{setting} selects {what} of {_words_of(tuple(those))}"
        fix = f"{setting.removal} ({PICKS_ITSELF})"
        yield Problem(
            summary=summary, evidence=(right,), fix=fix, severity=severity, hosts=(node.host,), kind=setting.kind
        )


def _entry_fault(port: RdmaPort, index: int) -> tuple[str, Severity] | None:
    gid = next((gid for gid in port.gids if gid.index == index), None)
    if gid is None:
        return "an empty entry of the address table", Severity.ERROR
    if not gid.type:
        return "an entry whose type cannot be read here, such as one of another container,", Severity.WARNING
    if gid.type != V2:
        return "a RoCE v1 entry", Severity.ERROR if _routes(port, "IPv4") else Severity.WARNING
    own = next((entry.netdev for entry in port.gids if entry.netdev), None)  # of the port itself, or of its bond
    if own and gid.netdev != own:
        return f"an entry of another interface ({gid.netdev})", Severity.WARNING
    return None


ABSENT = "no RDMA device found"


@rule(
    "DD335", "ib-hca-env", Severity.ERROR, "NCCL_IB_HCA matches missing devices, or more devices than intended",
    group=CheckGroup.LINKS, needs=("rdma", "gpus", "conf_files"),
    reads="NCCL_IB_HCA (also in NCCL's files), /sys/class/infiniband",
)  # fmt: skip
def check_ib_hca_env(node: Node) -> Answer:
    """Report a value of NCCL_IB_HCA that does not fit the RDMA devices of the machine."""
    setting = net.find_setting(node, node.first, "NCCL_IB_HCA")
    if isinstance(node.rdma, Unread):
        gpus = known(node.gpus)
        if setting is None or node.rdma.why is not Why.ABSENT or gpus is None or not gpus.devices:
            need(node.rdma)
        summary = f"{setting} names RDMA devices, but there are none here: NCCL will use TCP sockets"
        give = "give the container its RDMA devices (docker run --device=/dev/infiniband)"
        fix = f"{give}, or {setting.removal}" if setting is not None else ""
        return found(summary, ABSENT, evidence=("/sys/class/infiniband is empty",), fix=fix)
    if setting is None:
        return passed("NCCL_IB_HCA is not set: NCCL uses every active port")
    ports = [(device, port) for device, port in net.each_port(node.rdma) if port.link_layer in net.VERBS_LAYERS]
    if not ports:
        return skipped("the RDMA devices here are neither InfiniBand nor Ethernet: NCCL_IB_HCA does not apply to them")
    wanted = net.parse_nccl_list(setting.value)
    taken = [net.label(device, port) for device, port in ports if wanted.takes(device.name, port.port)]
    names = [device.name for device, _ in ports]
    here = [f"devices here: {net.words(names)}"]
    if wanted.marked:
        here.append(f"= and ^ are only allowed once, before the whole list, not in {net.words(wanted.marked)}")
    if not taken:
        what = "excludes every RDMA device" if wanted.exclude else "matches no RDMA device"
        summary = f"{setting} {what} of this machine: NCCL will use TCP sockets"
        fix = setting.removal if setting.path else f"export NCCL_IB_HCA=={','.join(dict.fromkeys(names))}"
        return found(summary, f"{setting} matches no port", evidence=tuple(here), fix=fix, kind=setting.kind)
    problems = []
    for entry in wanted.entries:
        matched = dict.fromkeys(device.name for device, port in ports if wanted.matches(entry, device.name, port.port))
        more = [name for name in matched if name != entry.name and not wanted.names(name)]
        if not matched:
            summary, evidence = f"{entry} in {setting} matches no RDMA device of this machine", tuple(here)
            fix = f"remove {entry} from NCCL_IB_HCA, or find out why the device is missing: ls /sys/class/infiniband"
        elif more and not wanted.exact and entry.name in matched:
            exact = f"{'^=' if wanted.exclude else '='}{','.join(map(str, wanted.entries))}"
            what = f"also {'excludes' if wanted.exclude else 'takes'} {net.words(more)}"
            summary = f"{entry} in {setting} {what}: entries are prefixes of names"
            evidence = (f"use = before the list to match full names: {exact}",)
            fix = f"in {setting.path}: NCCL_IB_HCA={exact}" if setting.path else f"export NCCL_IB_HCA={exact}"
        else:
            continue
        severity, kind = Severity.WARNING, setting.kind
        problems.append(Problem(summary=summary, evidence=evidence, fix=fix, severity=severity, kind=kind))
    return judged(problems, f"{setting} matches {len(taken)} of {len(ports)} ports: {net.words(taken)}")


@rule(
    "DD339", "ib-disabled", Severity.WARNING, "A variable disables a working RDMA network", group=CheckGroup.LINKS,
    needs=("rdma", "conf_files"),
    reads="NCCL_IB_DISABLE and NCCL_NET (also in NCCL's files), /sys/class/infiniband/*/ports/*/state",
)  # fmt: skip
def check_ib_disabled(node: Node) -> Answer:
    """Report NCCL_IB_DISABLE=1, or NCCL_NET=Socket, on a machine with an RDMA network that is up."""
    rdma = need(node.rdma)
    disable = net.find_setting(node, node.first, "NCCL_IB_DISABLE")
    if disable is not None and disable.number:
        setting = None if disable.path else disable  # in a file it is for nccl-conf to say
    else:
        network = net.find_setting(node, node.first, "NCCL_NET")
        setting = network if network is not None and network.value.lower() == "socket" else None
    ports = net.network_ports(node, rdma)
    if setting is None:
        return passed("neither NCCL_IB_DISABLE nor NCCL_NET disables RDMA")
    if not ports:
        up = net.words(
            [net.label(device, port) for device, port in net.each_port(rdma) if net.is_active(port)] or ["none"]
        )
        return passed(f"{setting}, but no port is on a training network (active: {up})")
    summary = f"{setting} disables this machine's RDMA network: NCCL will use TCP sockets"
    evidence = (f"active: {_words_of(ports)}, {ports[0][1].rate_text or ports[0][1].link_layer}",)
    seen = f"{setting}, and {len(ports)} ports are active"
    return found(summary, seen, evidence=evidence, fix=setting.removal, kind=setting.kind)
