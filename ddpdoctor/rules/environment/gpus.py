"""DD304-306, DD311, DD327 and DD328: GPUs are there, visible, used by one rank each, and neither fail nor hang."""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.launch import VARIABLE, Visible, read_visible
from ddpdoctor.model.reading import NotRead, Unread, Why, known, need
from ddpdoctor.model.words import count_of, format_age, grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, found, judged, skipped
from ddpdoctor.rules.environment.launch import ranks_of
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddpdoctor.model.node import Fleet, Gpu, GpuProcess, Gpus, Node, NodeProcess, PeerCopy, TorchBuild


# Products that NVIDIA lists as data-center GPUs (docs.nvidia.com/datacenter/tesla, "Supported GPUs"). Each is one word
# of the name that NVML gives, such as "NVIDIA A100-SXM4-80GB".
DATA_CENTER_PARTS = frozenset({
    "K80", "M40", "M60", "P4", "P40", "P100", "V100", "V100S", "T4", "T4G",
    "A2", "A10", "A10G", "A10M", "A16", "A30", "A30X", "A40", "A100", "A100X", "A800",
    "L2", "L4", "L20", "L40", "L40G", "L40S", "H20", "H100", "H800", "H200", "GH200",
    "B100", "B200", "B300", "GB200", "GB300",
})  # fmt: skip
# Parts whose SXM modules do not say SXM in their name: "NVIDIA H100 80GB HBM3". Cards say "PCIe" or "NVL".
BOARD_PARTS = frozenset({"H20", "H100", "H200", "H800", "B100", "B200", "B300", "GB200", "GB300"})
# Their memory is a NUMA node, where the kernel also caches files: memory in use says nothing about processes.
COHERENT_PARTS = frozenset({"GH200", "GB200", "GB300", "GB10"})


def is_data_center(gpu: Gpu) -> bool:
    """Return whether a GPU is built for servers, judged by its name."""
    if "GeForce" in gpu.name or "RTX A" in gpu.name or "Quadro" in gpu.name:
        return False
    return bool(_name_words(gpu) & DATA_CENTER_PARTS) or "Server Edition" in gpu.name


def is_laptop(gpu: Gpu) -> bool:
    """Return whether a GPU shares heat and power with a processor, judged by its name."""
    return "Laptop" in gpu.name or "Max-Q" in gpu.name or "Mobile" in gpu.name


def is_board(gpu: Gpu) -> bool:
    """Return whether a GPU sits on a board that wires all NVLinks, rather than on a card with an optional bridge."""
    words = _name_words(gpu)
    return "SXM" in gpu.name.upper() or (bool(words & BOARD_PARTS) and not words & {"PCIe", "PCIE", "NVL"})


def is_coherent(gpu: Gpu) -> bool:
    """Return whether the kernel itself uses a GPU's memory."""
    return bool(_name_words(gpu) & COHERENT_PARTS)


def _name_words(gpu: Gpu) -> set[str]:
    return set(re.split(r"[\s-]+", gpu.name))


def driver_of(node: Node) -> str | None:
    """Return the version of the NVIDIA driver, from the kernel or else from NVML."""
    software, gpus = known(node.software), known(node.gpus)
    return (software.driver if software else None) or (gpus.driver if gpus else None)


def nvidia_gpus(node: Node) -> int:
    """Count the NVIDIA GPUs that this machine or container has been given.

    /proc and the PCI bus do not count, because in a container without GPUs they show the host's.
    """
    gpus, software = known(node.gpus), known(node.software)
    if gpus is not None and gpus.devices:
        return len(gpus.devices)
    return sum(bool(re.fullmatch(r"/dev/nvidia\d+", path)) for path in software.gpu_devices) if software else 0


def imported_torch(node: Node) -> TorchBuild:
    """Return torch's build. Raises ``NotRead`` if it cannot be imported, which `torch-import` reports."""
    build = need(node.torch)
    if build.import_error is not None:
        raise NotRead(Unread(why=Why.ABSENT, reason="torch cannot be imported"))
    return build


def wrong_copies(node: Node) -> list[PeerCopy]:
    """Return the copies between GPUs that failed or came out wrong in the test of --deep."""
    trial = known(node.gpu_trial)
    return [copy for copy in trial.copies if not copy.ok] if trial is not None else []


def listed(node: Node) -> Gpus:
    """Return what NVML says about the node's GPUs.

    Raises ``NotRead`` if NVML lists no GPU or does not start. Another check reports that NVML does not start.
    """
    gpus = need(node.gpus)
    if gpus.init_error is not None:
        raise NotRead(Unread(why=Why.ABSENT, reason=f"NVML does not start: {gpus.init_error}"))
    if not gpus.devices:
        raise NotRead(Unread(why=Why.ABSENT, reason="NVML lists no GPU"))
    return gpus


def keys_of(gpus: Gpus) -> tuple[str, ...]:
    """Return a unique key for each device, in NVML's order: its UUID, or a placeholder if the device is lost."""
    return tuple(gpu.uuid or f"no answer from {gpu.index}" for gpu in gpus.devices)


def visible_to(process: NodeProcess, gpus: Gpus) -> Visible:
    """Return the devices that a process's CUDA_VISIBLE_DEVICES leaves visible."""
    return read_visible(process.variables.get(VARIABLE), keys_of(gpus))


def sees_its_own(process: NodeProcess) -> bool:
    """Return whether a process may have GPUs that others on its node do not see, as under Slurm."""
    return "SLURM_PROCID" in process.variables and "TORCHELASTIC_RUN_ID" not in process.variables


def in_use(node: Node) -> tuple[Gpu, ...]:
    """Return the GPUs that the processes of a node see, or all GPUs if that is not known.

    Raises ``NotRead`` if all are hidden on purpose, because then the job needs none.
    """
    gpus = listed(node)
    if all(visible_to(process, gpus).on_purpose for process in node.processes):
        raise NotRead(Unread(why=Why.NEEDLESS, reason=f"{VARIABLE} hides all GPUs"))
    by_bus = all(process.variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" for process in node.processes)
    if len({gpu.name for gpu in gpus.devices}) > 1 and not by_bus:
        return gpus.devices  # CUDA's default puts the fastest first, and not in NVML's order
    seen = {device for process in node.processes for device in visible_to(process, gpus).devices}
    chosen = tuple(gpu for gpu, key in zip(gpus.devices, keys_of(gpus), strict=True) if key in seen)
    return chosen or gpus.devices


def device_of(process: NodeProcess, gpus: Gpus) -> str | None:
    """Return the key of the device that a rank uses: the only one that it sees, or the one of its local rank."""
    devices = visible_to(process, gpus).devices
    if len(devices) == 1:
        return devices[0]
    if process.local_rank is not None and 0 <= process.local_rank < len(devices):
        return devices[process.local_rank]
    return None


def ranks_on(node: Node, gpus: Iterable[Gpu]) -> tuple[int, ...]:
    """Return the ranks that use these GPUs."""
    everything = need(node.gpus)
    wanted = {gpu.uuid for gpu in gpus}
    return tuple(
        process.rank
        for process in node.processes
        if process.rank is not None and device_of(process, everything) in wanted
    )


def strangers(gpu: Gpu, node: Node) -> list[GpuProcess]:
    """Return the processes that compute on a GPU and do not belong to this job."""
    pids = {process.pid for process in node.processes}
    return [process for process in gpu.processes or () if not (process.ours or process.graphics or process.pid in pids)]


def gpu_list(gpus: Iterable[Gpu] | Iterable[int]) -> str:
    """Return "GPU 3", "GPUs 0 and 2" or "GPUs 0-6, 9"."""
    return rank_list((gpu if isinstance(gpu, int) else gpu.index for gpu in gpus), "GPU")


def numbers(gpus: Iterable[Gpu]) -> str:
    """Return "2,5", the form that `nvidia-smi -i` takes."""
    return ",".join(str(gpu.index) for gpu in gpus)


def label(gpu: Gpu) -> str:
    """Return "GPU 2 (NVIDIA H100 80GB HBM3, 0000:52:00.0)"."""
    said = [word for word in (gpu.name, gpu.bus_id) if word]
    return f"GPU {gpu.index} ({', '.join(said)})" if said else f"GPU {gpu.index}"


def gpu_problem(
    node: Node,
    gpus: Sequence[Gpu],
    what: str,
    *,
    detail: Callable[[Gpu], str],
    fix: str,
    severity: Severity | None = None,
) -> list[Problem]:
    """Make one problem for all GPUs that have it, or none if ``gpus`` is empty.

    ``what`` follows "GPUs 2 and 5". "{has/have}" stands for the form for one GPU or for several, {ids} for "2,5".
    """
    if not gpus:
        return []
    summary, fix = f"{gpu_list(gpus)} {_inflect(what, gpus)}", _inflect(fix, gpus).replace("{ids}", numbers(gpus))
    evidence = tuple(f"{label(gpu)}: {detail(gpu)}" for gpu in gpus)
    return [Problem(summary=summary, evidence=evidence, fix=fix, severity=severity, ranks=ranks_on(node, gpus))]


def _inflect(text: str, gpus: Sequence[object]) -> str:
    return re.sub(r"\{([^{}/]*)/([^{}/]*)\}", lambda forms: forms[1 if len(gpus) == 1 else 2], text)


# How opening a device file ends if a container or a batch system denies it to this process.
KEPT_FROM_US = frozenset({None, "EPERM", "EACCES", "ENOENT"})
MISMATCH = "LIB_RM_VERSION_MISMATCH"


@rule(
    "DD304", "gpu-count", Severity.ERROR, "A GPU is missing or does not respond, or there are fewer GPUs than ranks",
    group=CheckGroup.GPUS, needs=("gpus", "torch"),
    reads="NVML, /sys/bus/pci/devices, /proc/driver/nvidia/gpus, torch.cuda.device_count()",
)  # fmt: skip
def check_gpu_count(node: Node) -> Answer:
    """Report a GPU that does not work, one that the driver does not list, and more ranks than GPUs."""
    torch = known(node.torch)
    if torch is not None and torch.cuda_stuck:
        summary = "CUDA does not start: `torch.cuda.init()` hangs or dies, and so does each job that uses a GPU"
        fix = (
            "sudo dmesg | grep -E 'NVRM|Xid'; if `nvidia-smi` hangs too, drain the node and reboot it. "
            "A job on CPUs does not need it: export CUDA_VISIBLE_DEVICES="
        )
        return found(summary, torch.cuda_error or "", evidence=(torch.cuda_error,) if torch.cuda_error else (), fix=fix)
    gpus = need(node.gpus)
    if gpus.init_error == MISMATCH:
        return skipped("NVML does not start because driver and library differ: see driver-lib-mismatch")
    if gpus.init_error is not None:
        fix = (
            "ls -l /dev/nvidia*, and add this user to the group that may open them"
            if gpus.init_error == "NO_PERMISSION"
            else "outside a container: nvidia-smi; sudo dmesg | grep NVRM. In a container that lost its GPUs after "
            "`systemctl daemon-reload` on the host (github.com/NVIDIA/nvidia-container-toolkit/issues/1227): restart it"
        )
        summary = "The NVIDIA driver is installed, but NVML does not start, so no GPU can be used"
        evidence = (f"nvmlInit fails with {gpus.init_error}",)
        return found(summary, f"NVML does not start: {gpus.init_error}", evidence=evidence, fix=fix)
    problems = []
    silent = [gpu for gpu in gpus.devices if gpu.error is not None]
    if silent:
        problems.append(Problem(
            summary=f"{gpu_list(silent)} {_inflect('{does/do} not respond: jobs that use {it/them} fail', silent)}",
            evidence=tuple(f"{label(gpu)}: {gpu.error}" for gpu in silent),
            fix=f"sudo dmesg | grep -E 'NVRM|Xid'; then sudo nvidia-smi -r -i {numbers(silent)}, or reboot",
            ranks=ranks_on(node, [gpu for gpu in silent if gpu.uuid]),
        ))  # fmt: skip
    problems += [*_unlisted(gpus), *_counts(node, gpus, torch)]
    seen = [f"NVML lists {len(gpus.devices)}"]
    seen += [f"torch sees {torch.device_count}"] if torch is not None else []
    seen += [f"{len(node.ranks)} ranks"] if node.ranks else []
    return judged(problems, ", ".join(seen))


def _unlisted(gpus: Gpus) -> Iterator[Problem]:
    if any(not gpu.bus_id for gpu in gpus.devices):
        return  # one that NVML lists and that cannot report its place would count twice
    here = {gpu.bus_id for gpu in gpus.devices}
    models = {gpu.device for gpu in gpus.on_bus if gpu.bus_id in here}
    others = [gpu for gpu in gpus.on_bus if gpu.bus_id not in here]
    # If this process was given some of the GPUs, the rest of the node is not its business.
    has_some = any(gpu.driver == "nvidia" for gpu in others)
    for gpu in others:
        if gpu.driver == "nvidia" and gpu.open_error not in KEPT_FROM_US:
            opens = "opens" if gpu.open_error == "ok" else f"fails with {gpu.open_error}"
            evidence, confidence = f"its device file {opens}, so this process has access", Confidence.HIGH
        elif gpu.driver is None and gpu.device in models and not has_some:
            evidence = "the NVIDIA driver did not claim it, but claimed other GPUs of its model"
            confidence = Confidence.MEDIUM
        else:
            continue
        summary = f"The GPU at {gpu.bus_id} is on the PCI bus, but NVML does not list it: it is broken"
        fix = f"sudo dmesg | grep -E 'NVRM|{gpu.bus_id}'; then reboot, and drain the node if the GPU stays missing"
        yield Problem(summary=summary, evidence=(evidence,), fix=fix, confidence=confidence)


def _counts(node: Node, gpus: Gpus, torch: TorchBuild | None) -> Iterator[Problem]:
    """Compare torch with NVML, and ranks with GPUs if all ranks of the node see the same ones."""
    visible = visible_to(node.first, gpus)
    count = len(visible.devices)
    is_clear = torch is not None and torch.cuda is not None and not any(gpu.mig_enabled for gpu in gpus.devices)
    if torch is not None and is_clear and torch.device_count < count and not any(gpu.error for gpu in gpus.devices):
        summary = f"torch sees {torch.device_count} of {count} GPUs that NVML lists"
        fix = 'python -c "import torch; torch.cuda.init()" shows the CUDA error'
        yield Problem(summary=summary, evidence=(torch.cuda_error,) if torch.cuda_error else (), fix=fix)
    values = {process.variables.get(VARIABLE) for process in node.processes}
    if not node.ranks or len(values) > 1 or any(sees_its_own(process) for process in node.processes):
        return
    ranks = max(len(node.ranks), node.first.number("LOCAL_WORLD_SIZE") or 0)
    if not count or (visible.entries and count == 1):
        return  # cvd-valid and dup-gpu judge these
    if ranks > count:
        few = f"{ranks} ranks but only {count_of(count, 'GPU')} here"
        summary = f"{few}: {ranks - count} ranks have no cuda:LOCAL_RANK"
        fix = f"--nproc-per-node={count}; or, for a CPU job, export CUDA_VISIBLE_DEVICES="
        without = tuple(p.rank for p in node.processes if p.rank is not None and (p.local_rank or 0) >= count)
        yield Problem(summary=summary, evidence=(f"LOCAL_WORLD_SIZE is {ranks}",), fix=fix, ranks=without)
    elif ranks < count:
        summary = f"{count_of(ranks, 'rank')} for {count} GPUs: {count - ranks} stay idle"
        yield Problem(summary=summary, fix=f"use --nproc-per-node={count} to use all GPUs", severity=Severity.INFO)


@rule(
    "DD305", "cvd-valid", Severity.ERROR, "CUDA_VISIBLE_DEVICES hides GPUs that it names",
    group=CheckGroup.GPUS, needs=("gpus",), reads="CUDA_VISIBLE_DEVICES, NVML",
)  # fmt: skip
def check_cvd_valid(node: Node) -> Answer:
    """Report a `CUDA_VISIBLE_DEVICES` that leaves fewer GPUs visible than it names."""
    gpus = listed(node)
    processes = node.processes[:1] if sees_its_own(node.first) else node.processes
    having = [process for process in processes if VARIABLE in process.variables]
    if not having:
        return skipped(f"{VARIABLE} is not set")
    problems, count = [], len(gpus.devices)
    for process in having:
        visible, ranks = visible_to(process, gpus), ranks_of([process])
        value = f"{VARIABLE}={process.variables[VARIABLE]}"
        if visible.on_purpose:
            fix = f"unset {VARIABLE} if the job should use GPUs"
            summary = f"{value} hides all {count} GPUs"
            problems.append(Problem(summary=summary, fix=fix, severity=Severity.INFO, ranks=ranks))
            continue
        if visible.repeated:
            what = "names a device twice, so CUDA shows no device at all"
            evidence = f"named twice: {', '.join(visible.repeated)}"
        elif visible.bad_entry is not None and (visible.bad_entry != "-1" or visible.hidden):
            ignored = f"{visible.bad_entry or 'an empty entry'}, which is not a device here: CUDA ignores it"
            what = f"names {ignored} and all later entries, and shows {len(visible.devices)}"
            evidence = f"there are {count} GPUs: 0 to {count - 1}"
        else:
            continue
        kept: dict[str, str] = {}  # the entries that name a device, each once
        for given in visible.entries:
            for device in read_visible(given, keys_of(gpus)).devices:
                kept.setdefault(device, given)
        fix = f"export {VARIABLE}={','.join(kept.values() or (str(gpu.index) for gpu in gpus.devices))}"
        problems.append(Problem(summary=f"{value} {what}", evidence=(evidence,), fix=fix, ranks=ranks))
    shown = ", ".join(dict.fromkeys(f"{VARIABLE}={process.variables[VARIABLE]}" for process in having))
    return judged(problems, f"{shown} of {count} GPUs")


SHARED_NAMED = 4  # how many shared devices are named one by one
SHARING_ALLOWED = "NCCL_MULTI_RANK_GPU_ENABLE"
HOST_ID = "NCCL_HOSTID"


@rule(
    "DD306", "dup-gpu", Severity.ERROR, "Several ranks use the same GPU",
    group=CheckGroup.GPUS, needs=("gpus",), reads="CUDA_VISIBLE_DEVICES, LOCAL_RANK, UUIDs of NVML",
)  # fmt: skip
def check_dup_gpu(fleet: Fleet) -> Answer:
    """Report ranks that use the same GPU."""
    if not fleet.gathered:
        return skipped("there is only one process")
    by_device: dict[str, list[tuple[Node, NodeProcess]]] = {}
    for node, gpus in fleet.each(lambda node: node.gpus):
        values = {process.variables.get(VARIABLE) for process in node.processes}
        if values == {None} and len(gpus.devices) == 1:
            continue  # a machine with one GPU: gpu-count compares it with the ranks
        for process in node.processes:
            device = device_of(process, gpus)
            # A number may mean another device to a process with GPUs of its own than to the one that read NVML.
            entries = visible_to(process, gpus).entries or ("0",)
            is_sure = not sees_its_own(process) or not any(entry.isdecimal() for entry in entries)
            if process.rank is not None and device is not None and is_sure:
                by_device.setdefault(device, []).append((node, process))
    if not by_device:
        return skipped("the GPUs of the ranks are unknown")
    shared = {device: users for device, users in by_device.items() if len(users) > 1}
    seen = f"{sum(map(len, by_device.values()))} ranks on {len(by_device)} GPUs"
    return judged([_sharing(shared)] if shared else [], seen)


def _sharing(shared: dict[str, list[tuple[Node, NodeProcess]]]) -> Problem:
    named, is_allowed = [], True
    for device, users in shared.items():
        node, processes = users[0][0], [process for _, process in users]
        gpus = known(node.gpus)
        keys = keys_of(gpus) if gpus is not None else ()
        name = f"GPU {keys.index(device)}" if device in keys else device
        named.append(f"{rank_list(ranks_of(processes))} on {name} of {node.host}")
        # NCCL lets ranks share if a variable allows it, or if they are disguised as ranks of different hosts.
        hosts = {process.variables.get(HOST_ID) for process in processes}
        is_allowed &= all(process.variables.get(SHARING_ALLOWED) == "1" for process in processes) or (
            None not in hosts and len(hosts) == len(processes)
        )
    if len(named) > SHARED_NAMED:
        named[SHARED_NAMED:] = [f"and {len(named) - SHARED_NAMED} more GPUs"]
    device, users = next(iter(shared.items()))
    first = users[0][1]
    place = f"{VARIABLE}={first.variables.get(VARIABLE, '(not set)')}, local rank {first.local_rank}"
    refuses = "" if is_allowed else ", which NCCL does not allow"
    in_script = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) in the script'
    return Problem(
        summary=f"Several ranks use one GPU{refuses}: {'; '.join(named)}",
        evidence=(f"rank {first.rank}: {place}: {device}",),
        fix=f"set the same {VARIABLE} with all GPUs for every rank on a node, and call {in_script}",
        severity=Severity.WARNING if is_allowed else None,
        ranks=ranks_of(process for users in shared.values() for _, process in users),
        hosts=tuple(dict.fromkeys(node.host for users in shared.values() for node, _ in users)),
    )


REBOOT = "drain the node and reboot; if it comes back, have the GPU replaced"
RESET = "sudo nvidia-smi -r -i {index} when no process uses it, or reboot"
OF_THE_PROGRAM = "look for the error in the program that was running"
# Severity, meaning and fix of each number. Numbers and meanings come from NVIDIA's Xid catalog,
# docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html; severities follow gcm and gpud.
XIDS: dict[int, tuple[Severity, str, str]] = {
    48: (Severity.ERROR, "a memory error that ECC could not correct", RESET),
    64: (Severity.ERROR, "a bad memory row or page that could not be taken out of use", REBOOT),
    74: (Severity.ERROR, "an NVLink error", "nvidia-smi nvlink -e -i {index}; drain the node and reset all its GPUs"),
    79: (Severity.ERROR, "it fell off the bus", REBOOT),
    95: (Severity.ERROR, "a memory error that was not contained: all its processes may have been hit", RESET),
    119: (Severity.ERROR, "its system processor (GSP) does not answer", REBOOT),
    120: (Severity.ERROR, "an error of its system processor (GSP)", REBOOT),
    140: (Severity.ERROR, "a memory error that ECC could not recover from", RESET),
    63: (Severity.WARNING, "a bad memory row or page that stays in use until the next reset", RESET),
    92: (Severity.WARNING, "very many corrected memory errors", RESET),
    94: (Severity.WARNING, "a memory error that ended one process and was contained", RESET),
    13: (Severity.INFO, "a fault in a program's kernel", OF_THE_PROGRAM),
    31: (Severity.INFO, "a program's access to an invalid address", OF_THE_PROGRAM),
    43: (Severity.INFO, "a program fault that ended the program", OF_THE_PROGRAM),
    45: (Severity.INFO, "the end of a program that had failed or was killed", "check what failed before it"),
}
OTHER_XID = (Severity.INFO, "an error unknown to ddpdoctor", "see https://docs.nvidia.com/deploy/xid-errors")


@rule(
    "DD311", "xid", Severity.ERROR, "The driver reported GPU errors (Xid) since boot",
    group=CheckGroup.GPUS, needs=("kernel_log", "gpus"), reads="/dev/kmsg: NVRM: Xid",
)  # fmt: skip
def check_xid(node: Node) -> Answer:
    """Report Xid errors of this node's GPUs since boot."""
    if isinstance(node.gpus, Unread) and node.gpus.why is Why.ABSENT:
        return skipped(node.gpus.reason)  # in a container, the log and the GPUs in it are the host's
    gpus = known(node.gpus)
    devices = {gpu.bus_id: gpu for gpu in gpus.devices if gpu.bus_id} if gpus is not None else {}
    # If the bus id of a GPU is not known, any line may belong to it.
    is_lost = gpus is not None and any(not gpu.bus_id for gpu in gpus.devices)
    xids = [xid for xid in need(node.kernel_log).xids if not devices or xid.bus_id in devices or is_lost]
    problems = []
    for (bus_id, code), alike in grouped(((xid.bus_id, xid.code), xid) for xid in xids).items():
        gpu, last = devices.get(bus_id), min(alike, key=lambda xid: xid.age_s if xid.age_s is not None else inf)
        severity, meaning, fix = XIDS.get(code, OTHER_XID)
        where = f"GPU {gpu.index}" if gpu is not None else f"The GPU at {bus_id}"
        times = f", {len(alike)} times" if len(alike) > 1 else ""
        age = "" if last.age_s is None else f" {format_age(last.age_s)} ago"
        problems.append(Problem(
            summary=f"{where} had Xid {code}: {meaning}",
            evidence=(f"{bus_id}{age}{times}: {last.text}",),
            fix=fix.replace("{index}", str(gpu.index) if gpu is not None else bus_id),
            severity=severity,
            ranks=ranks_on(node, [gpu]) if gpu is not None and severity is not Severity.INFO else (),
        ))  # fmt: skip
    return judged(problems, f"{len(xids)} Xid errors since boot")


LONG_S = 60.0  # No regular work of the driver takes longer. gpud and gcm wait for minutes before they report it.


@rule(
    "DD327", "gpu-alloc", Severity.ERROR, "A GPU hangs, fails or computes wrong results",
    group=CheckGroup.GPUS, needs=("gpu_trial",), reads="memory and matrix products on every GPU",
)  # fmt: skip
def check_gpu_alloc(node: Node) -> Answer:
    """Report GPUs that hang, fail or compute wrongly when they are given work (`--deep`)."""
    trial = need(node.gpu_trial)
    late = [work for work in trial.work if work.timed_out]
    wrong = [work for work in trial.work if not work.ok and not work.timed_out]
    problems = [
        Problem(
            summary=f"{gpu_list([work.index for work in bad])} {_inflect(what, bad)}",
            evidence=tuple(f"GPU {work.index} in torch's numbering: {work.error}" for work in bad),
            fix=f"sudo dmesg | grep -E 'NVRM|Xid'; {fix}",
        )
        for bad, what, fix in (
            (late, "{does/do} not finish a few matrix products", "reboot the node, and try again"),
            (wrong, "{fails/fail} under load, or {computes/compute} wrong results",
             "dcgmi diag -r 3; reset or reboot"),
        )
        if bad
    ]  # fmt: skip
    slowest = max((work.seconds for work in trial.work), default=0.0)
    return judged(problems, f"{len(trial.work)} GPUs tested, the slowest took {slowest:.1f} s")


@rule(
    "DD328", "dstate", Severity.ERROR, "A process hangs inside the NVIDIA driver",
    group=CheckGroup.GPUS, needs=("stuck_processes",), reads="/proc/PID/stat, wchan, stack, status; /dev/kmsg",
)  # fmt: skip
def check_dstate(node: Node) -> Answer:
    """Report processes that hang inside the driver and that no signal can end."""
    stuck = need(node.stuck_processes)
    long = [process for process in stuck if (process.seconds or 0.0) >= LONG_S]
    short = [process for process in stuck if process not in long]
    problems = []
    for those, words, severity, sure in (
        (long, "and its GPU is unlikely to recover", None, Confidence.HIGH),
        (short, "for at least a second", Severity.WARNING, Confidence.MEDIUM),
    ):
        if those:
            names = ", ".join(dict.fromkeys(process.name for process in those))
            summary = f"{names} {'hangs' if len(those) == 1 else 'hang'} inside the NVIDIA driver, {words}"
            evidence = tuple(
                f"pid {process.pid} ({process.name}) in {process.wchan or 'an unknown function'}, for "
                + ("an unknown time" if process.seconds is None else f"at least {process.seconds:.0f} s")
                for process in those
            )
            fix = "sudo dmesg | grep -E 'NVRM|Xid|blocked for'; reboot the node: no signal can end such a process"
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix, severity=severity, confidence=sure))
    return judged(problems, f"{len(stuck)} processes hang in the driver")
