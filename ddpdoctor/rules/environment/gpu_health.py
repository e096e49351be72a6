"""DD307 to DD310 and DD312 to DD319: the state of each GPU: its memory, its clocks, its settings, and who else uses it.

Most of these rules are rows: which GPUs report the state, which states are a fault, and the wording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import format_memory
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment import gpus as nvidia
from ddpdoctor.rules.majority import Voice, compare, describe, disagreement
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.model.node import Fleet, Gpu, Node

# The default of `--ecc_corrected_volatile_threshold` of gcm's check-nvidia-smi (facebookresearch/gcm).
MAX_CORRECTED = 50_000_000
# Our choice: near the 64 that a GPU can retire (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, "Row Remapping").
MAX_RETIRED_PAGES = 60
IDLE = 0x01
POWER_CAP, SOFTWARE_SLOWDOWN = 0x04, 0x20
# Bits of nvmlClocksEventReasons in nvml.h.
HARDWARE_SLOWDOWN = {0x08: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
NEAR_SLOWDOWN_C = 5  # our choice: a GPU this close reaches the threshold within minutes under load
POWER_TOLERANCE_MW = 1_000  # our choice: NVML rounds limits
# Our choice, near gcm's and gpud's thresholds: a CUDA context without any tensor takes as much.
OTHERS_BYTES = 500 * 2**20
MOST = 0.5  # our choice: beyond this share of the memory, a job that needs the whole GPU does not fit
UNSEEN_BYTES = 2**30  # our choice, for memory whose owners cannot be seen: more than a screen or a driver takes
# What the GPU test of --deep may hold at the same time: 2 GiB, the same again while it compares, and its context.
TRIAL_BYTES = 4 * 2**30

RESET = "sudo nvidia-smi -r -i {ids} when no process uses {it/them}, or reboot"
REPLACE = "drain the node and have {it/them} replaced; for the serial number: nvidia-smi -q -i {ids} | grep -i serial"
COOL = "nvidia-smi -q -d TEMPERATURE -i {ids}; then check the cooling"
E, W, I = Severity.ERROR, Severity.WARNING, Severity.INFO  # noqa: E741 - a column of the table


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A faulty state of GPUs: which GPUs are in it, the summary, the detail of each, and the fix."""

    severity: Severity
    is_in: Callable[[Gpu], object]
    what: str | Callable[[Sequence[Gpu]], str]
    detail: Callable[[Gpu], str]
    fix: str | Callable[[Sequence[Gpu]], str]


def _state_rule(  # noqa: PLR0913 - the columns of a row
    code: str, kind: str, severity: Severity, summary: str, says: str, *, reads: str, nothing: str,
    is_read: Callable[[Gpu], object], seen: Callable[[Sequence[Gpu]], str], faults: tuple[GpuFault, ...],
    settled: Callable[[Node, Sequence[Gpu]], Answer | None] = lambda _node, _gpus: None,
) -> None:  # fmt: skip
    def check(node: Node) -> Answer:
        gpus = [gpu for gpu in nvidia.in_use(node) if is_read(gpu)]
        if not gpus:
            return skipped(nothing)
        if answer := settled(node, gpus):
            return answer
        problems: list[Problem] = []
        for fault in faults:
            bad = [gpu for gpu in gpus if fault.is_in(gpu)]
            what, fix = (text if isinstance(text, str) else text(bad) for text in (fault.what, fault.fix))
            problems += nvidia.gpu_problem(node, bad, what, detail=fault.detail, fix=fix, severity=fault.severity)
        return judged(problems, seen(gpus))

    check.__doc__ = says
    rule(code, kind, severity, summary, group=CheckGroup.GPUS, needs=("gpus",), reads=reads)(check)


# memory errors, and how the GPU handled them


def _total(gpus: Sequence[Gpu], field: str) -> int:
    return sum(getattr(gpu, field) or 0 for gpu in gpus)


def _yes_no(flag: object) -> str:
    return "yes" if flag else "no"


def _uncorrected(gpu: Gpu) -> str:
    ever = "" if gpu.ecc_uncorrected_aggregate is None else f", {gpu.ecc_uncorrected_aggregate} in its lifetime"
    return f"{gpu.ecc_uncorrected_volatile} uncorrected errors since the driver was loaded{ever}"


def _remap(gpu: Gpu) -> str:
    return (
        f"rows remapped after correctable errors {gpu.remapped_correctable}, after uncorrectable ones "
        f"{gpu.remapped_uncorrectable}; pending: {_yes_no(gpu.remap_pending)}, failed: {_yes_no(gpu.remap_failed)}"
    )


def _pages(gpu: Gpu) -> str:
    return f"{gpu.retired_pages} pages retired, pending: {_yes_no(gpu.retired_pending)}"


_state_rule(
    "DD307", "ecc-unc", E, "GPU memory had errors that ECC could not correct",
    "Report uncorrected memory errors since the driver was loaded, and ECC that is switched off.",
    reads="NVML: ECC mode and error counters", nothing="no GPU here reports ECC",
    is_read=lambda gpu: gpu.ecc_enabled is not None,
    settled=lambda _, gpus: None
    if any(gpu.ecc_enabled or gpu.ecc_uncorrected_volatile or nvidia.is_data_center(gpu) for gpu in gpus)
    else skipped("these GPUs have no ECC, or it is off by default"),
    seen=lambda gpus: f"{_total(gpus, 'ecc_uncorrected_volatile')} uncorrected errors now, "
    f"{_total(gpus, 'ecc_uncorrected_aggregate')} in total",
    faults=(
        GpuFault(E, lambda gpu: gpu.ecc_uncorrected_volatile,
              "had memory errors that ECC could not correct, and {is/are} likely to have more", _uncorrected, RESET),
        GpuFault(W, lambda gpu: (gpu.ecc_corrected_volatile or 0) > MAX_CORRECTED,
              "{corrects/correct} very many memory errors: the memory is failing",
              lambda gpu: f"{gpu.ecc_corrected_volatile:,} corrected errors since the driver was loaded", REPLACE),
        GpuFault(W, lambda gpu: gpu.ecc_enabled is False and nvidia.is_data_center(gpu),
              "{runs/run} without ECC: bit flips can silently corrupt the weights", lambda _: "ECC is off",
              "sudo nvidia-smi -i {ids} -e 1, then reset or reboot"),
    ),
)  # fmt: skip
_state_rule(
    "DD308", "row-remap", E, "GPU memory rows must be remapped, or cannot be",
    "Report GPUs whose memory ran out of spare rows, or that need a reset to use one.",
    reads="NVML: remapped rows", nothing="no GPU here remaps memory rows",
    is_read=lambda gpu: gpu.remap_failed is not None or gpu.remap_pending is not None,
    seen=lambda gpus: f"{_total(gpus, 'remapped_correctable') + _total(gpus, 'remapped_uncorrectable')} rows remapped, "
    f"{sum(bool(gpu.remap_pending and not gpu.remap_failed) for gpu in gpus)} GPUs pending, "
    f"{sum(bool(gpu.remap_failed) for gpu in gpus)} failed",
    faults=(
        GpuFault(E, lambda gpu: gpu.remap_failed, "{has/have} bad memory rows and no spare rows left", _remap, REPLACE),
        GpuFault(E, lambda gpu: gpu.remap_pending and not gpu.remap_failed,
              "{has/have} a bad memory row that stays in use until a reset", _remap, RESET),
        GpuFault(W, lambda gpu: gpu.remapped_uncorrectable and not gpu.remap_failed and not gpu.remap_pending,
              "remapped memory rows after uncorrected errors: {it works/they work} now", _remap,
              "watch the count: nvidia-smi -q -d ROW_REMAPPER -i {ids}"),
    ),
)  # fmt: skip
_state_rule(
    "DD309", "retired-pages", E, "GPU memory pages must be retired, or many were retired",
    "Report GPUs before Ampere that still use a bad page of memory, or that retired very many pages.",
    reads="NVML: retired pages", nothing="no GPU here retires memory pages",
    is_read=lambda gpu: gpu.retired_pages is not None or gpu.retired_pending is not None,
    seen=lambda gpus: f"{_total(gpus, 'retired_pages')} pages retired",
    faults=(
        GpuFault(E, lambda gpu: gpu.retired_pending,
              "{has/have} a bad memory page that stays in use until the driver is reloaded", _pages, RESET),
        GpuFault(W, lambda gpu: (gpu.retired_pages or 0) >= MAX_RETIRED_PAGES,
              f"retired {MAX_RETIRED_PAGES} memory pages or more, and the maximum is 64", _pages, REPLACE),
    ),
)  # fmt: skip
_state_rule(
    "DD310", "sram-threshold", E, "A GPU's caches had too many uncorrected errors",
    "Report GPUs whose on-chip memories had more uncorrected errors than NVIDIA allows.",
    reads="NVML: SRAM ECC error status", nothing="no GPU or driver here reports errors in SRAM",
    is_read=lambda gpu: gpu.sram_threshold_exceeded is not None,
    seen=lambda gpus: f"threshold not exceeded on {len(gpus) - _total(gpus, 'sram_threshold_exceeded')} of {len(gpus)}",
    faults=(
        GpuFault(E, lambda gpu: gpu.sram_threshold_exceeded, "had more uncorrected cache errors than NVIDIA allows",
              lambda _: "threshold exceeded", REPLACE),
    ),
)  # fmt: skip


# clocks, heat and power


def _reasons(gpu: Gpu) -> int:
    return gpu.clock_event_reasons or 0


def _slowdowns(gpus: Sequence[Gpu]) -> list[str]:
    return list(dict.fromkeys(name for gpu in gpus for bit, name in HARDWARE_SLOWDOWN.items() if _reasons(gpu) & bit))


def _throttled(gpus: Sequence[Gpu]) -> str:
    return f"{{is/are}} throttled by {{its/their}} hardware: {', '.join(_slowdowns(gpus))}"


def _clock(gpu: Gpu) -> str:
    heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c} °C"
    power = "" if gpu.power_limit_mw is None else f", power limit {gpu.power_limit_mw / 1000:.0f} W"
    return f"clocks event reasons {hex(_reasons(gpu))}{heat}{power}"


def _is_hot(gpu: Gpu) -> bool:
    known_both = gpu.temperature_c is not None and gpu.slowdown_temperature_c
    return bool(known_both) and (gpu.temperature_c or 0) >= (gpu.slowdown_temperature_c or 0) - NEAR_SLOWDOWN_C


def _is_limited(gpu: Gpu) -> bool:
    known_both = gpu.power_limit_mw is not None and gpu.default_power_limit_mw is not None
    return known_both and (gpu.power_limit_mw or 0) < (gpu.default_power_limit_mw or 0) - POWER_TOLERANCE_MW


def _power(gpu: Gpu) -> str:
    return f"limit {(gpu.power_limit_mw or 0) / 1000:.0f} W, default {(gpu.default_power_limit_mw or 0) / 1000:.0f} W"


def _raise_power(gpus: Sequence[Gpu]) -> str:
    return f"sudo nvidia-smi -i {{ids}} -pl {next(((gpu.default_power_limit_mw or 0) // 1000 for gpu in gpus), 0)}"


def _heat_and_power(gpus: Sequence[Gpu]) -> str:
    heat = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    watts = sorted({gpu.power_limit_mw // 1000 for gpu in gpus if gpu.power_limit_mw is not None})
    limits = f"{', '.join(map(str, watts))} W" if watts else "not reported"
    return f"{f'at most {max(heat)} °C' if heat else 'temperatures not reported'}, power limits {limits}"


_PERFORMANCE = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {ids}; then check cooling and power supplies"
_LOWERED = "{has/have} a lowered power limit, and will be slow under load"
_state_rule(
    "DD312", "throttle", E, "A GPU is throttled right now",
    "Report GPUs that their hardware or driver is slowing down right now.",
    reads="NVML: clocks event reasons", nothing="no GPU here reports the reasons for its clock",
    is_read=lambda gpu: gpu.clock_event_reasons is not None,
    seen=lambda gpus: f"reasons {', '.join(sorted({hex(_reasons(gpu)) for gpu in gpus}))}; "
    f"{sum(bool(_reasons(gpu) & IDLE) for gpu in gpus)} of {len(gpus)} idle",
    faults=(
        GpuFault(E, lambda gpu: _slowdowns([gpu]) and nvidia.is_data_center(gpu), _throttled, _clock, _PERFORMANCE),
        GpuFault(W, lambda gpu: _slowdowns([gpu]) and not nvidia.is_data_center(gpu), _throttled, _clock, _PERFORMANCE),
        GpuFault(W, lambda gpu: _reasons(gpu) & SOFTWARE_SLOWDOWN and not _slowdowns([gpu]),
              "{is/are} throttled by the driver because of heat", _clock, COOL),
        GpuFault(I, lambda gpu: _reasons(gpu) & (POWER_CAP | SOFTWARE_SLOWDOWN) == POWER_CAP and not _slowdowns([gpu]),
              "{runs/run} at the power limit, as under full load: a process is using {it/them} now", _clock,
              "run nvidia-smi -i {ids} to see the process"),
    ),
)  # fmt: skip
_state_rule(
    "DD313", "temp-power", W, "A GPU is close to thermal throttling, or its power limit is lowered",
    "Report GPUs within 5 °C of thermal throttling, and GPUs with a lowered power limit.",
    reads="NVML: temperature and threshold, enforced and default power limit",
    nothing="no GPU here reports its temperature and its power limit",
    is_read=lambda gpu: None not in {gpu.temperature_c, gpu.power_limit_mw} or _is_hot(gpu) or _is_limited(gpu),
    seen=_heat_and_power,
    faults=(
        GpuFault(W, _is_hot, f"{{is/are}} within {NEAR_SLOWDOWN_C} °C of thermal throttling",
              lambda gpu: f"{gpu.temperature_c} °C, slowdown at {gpu.slowdown_temperature_c} °C", COOL),
        GpuFault(W, lambda gpu: _is_limited(gpu) and not nvidia.is_laptop(gpu), _LOWERED, _power, _raise_power),
        GpuFault(I, lambda gpu: _is_limited(gpu) and nvidia.is_laptop(gpu), _LOWERED, _power, _raise_power),
    ),
)  # fmt: skip


@rule(
    "DD314", "app-clocks", W, "Application clocks are lowered, or clocks differ between GPUs",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: application clocks, default clocks, maximum clocks",
)  # fmt: skip
def check_app_clocks(fleet: Fleet) -> Answer:
    """Report GPUs whose application clock is lowered, and GPUs of one model with different maximum clocks."""
    gpus = [(node, gpu) for node, those in fleet.each(lambda node: node.gpus) for gpu in those.devices]
    readable = [gpu for _, gpu in gpus if gpu.app_clock_sm_mhz is not None or gpu.max_clock_sm_mhz is not None]
    if not readable:
        return skipped("no GPU here reports its clocks")
    problems = []
    for host in dict.fromkeys(node.host for node, _ in gpus):
        node = next(node for node, _ in gpus if node.host == host)
        low = [
            gpu for node, gpu in gpus
            if node.host == host and None not in {gpu.app_clock_sm_mhz, gpu.default_app_clock_sm_mhz}
            and (gpu.app_clock_sm_mhz or 0) < (gpu.default_app_clock_sm_mhz or 0)
        ]  # fmt: skip
        if low:
            clocks = ((gpu, gpu.app_clock_sm_mhz, gpu.default_app_clock_sm_mhz) for gpu in low)
            evidence = tuple(f"{nvidia.label(gpu)}: {mhz} MHz, default {default} MHz" for gpu, mhz, default in clocks)
            summary = f"{nvidia.gpu_list(low)} {'has' if len(low) == 1 else 'have'} a lowered application clock"
            fix, ranks = f"sudo nvidia-smi -rac -i {nvidia.numbers(low)}", nvidia.ranks_on(node, low)
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix, ranks=ranks, hosts=(host,)))
    for name in dict.fromkeys(gpu.name for _, gpu in gpus):
        split = compare(
            Voice(host=node.host, value=gpu.max_clock_sm_mhz, ranks=nvidia.ranks_on(node, [gpu]))
            for node, gpu in gpus
            if gpu.name == name
        )
        if split is not None:
            summary = describe(split, f"the highest clock of {name} is", words=lambda clock: f"{clock} MHz")
            fix = "compare nvidia-smi -q -d CLOCK, the driver and the VBIOS of both"
            problems.append(disagreement(split, summary, fix, ranks=split.ranks))
    highest = sorted({gpu.max_clock_sm_mhz for gpu in readable if gpu.max_clock_sm_mhz is not None})
    return judged(problems, f"highest clocks of {len(readable)} GPUs: {', '.join(map(str, highest))} MHz")


_SLEEPS = "{takes/take} seconds to wake after idling: persistence mode is off"
_KEEP_AWAKE = "sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1"
_state_rule(
    "DD315", "persistence", W, "Persistence mode is off",
    "Report data-center GPUs that the driver puts to sleep when they are idle.",
    reads="NVML: persistence mode; /run/nvidia-persistenced/socket", nothing="no GPU here has persistence mode",
    is_read=lambda gpu: gpu.persistence is not None,
    settled=lambda node, _: passed("nvidia-persistenced runs") if nvidia.listed(node).persistenced else None,
    seen=lambda gpus: f"on for {_total(gpus, 'persistence')} of {len(gpus)}",
    faults=(
        GpuFault(W, lambda gpu: not gpu.persistence and nvidia.is_data_center(gpu), _SLEEPS,
              lambda _: "persistence mode is off", _KEEP_AWAKE),
        GpuFault(I, lambda gpu: not gpu.persistence and not nvidia.is_data_center(gpu), _SLEEPS,
              lambda _: "persistence mode is off", _KEEP_AWAKE),
    ),
)  # fmt: skip


@rule(
    "DD316", "mig", E, "GPUs are split into MIG slices",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: MIG mode; CUDA_VISIBLE_DEVICES",
)  # fmt: skip
def check_mig(node: Node) -> Answer:
    """Report GPUs in MIG mode: a process sees one slice, and slices cannot access each other's memory."""
    gpus = [gpu for gpu in nvidia.in_use(node) if gpu.mig_enabled is not None]
    on = [gpu for gpu in gpus if gpu.mig_enabled]
    if not on:
        return passed(f"off on {len(gpus)} GPUs") if gpus else skipped("no GPU here has MIG")
    several = len(node.ranks) > 1
    meant = all(process.variables.get(nvidia.SHARING_ALLOWED) == "1" for process in node.processes)
    consequence = (
        "ranks on slices have no NVLink, no peer access and, before NCCL 2.30.3, no NCCL"
        if several
        else "a process sees only one slice, and ranks on slices cannot access each other directly"
    )
    problems = nvidia.gpu_problem(
        node, on, f"{{is/are}} in MIG mode: {consequence}", detail=lambda _: "MIG is on",
        fix="sudo nvidia-smi -mig 0 -i {ids} when no process runs, or request whole GPUs",
        severity=E if several and not meant else W,
    )  # fmt: skip
    return judged(problems, f"on for {len(on)} of {len(gpus)}")


@rule(
    "DD317", "compute-mode", E, "A GPU's compute mode blocks a rank",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: compute mode, processes on each GPU",
)  # fmt: skip
def check_compute_mode(node: Node) -> Answer:
    """Report GPUs whose compute mode allows no process, or no second one."""
    gpus = [gpu for gpu in nvidia.in_use(node) if gpu.compute_mode is not None]
    if not gpus:
        return skipped("no GPU here has a compute mode")
    exclusive = [gpu for gpu in gpus if (gpu.compute_mode or "").startswith("exclusive")]
    others = {gpu.index: [str(stranger.pid) for stranger in nvidia.strangers(gpu, node)] for gpu in exclusive}
    ranks = {gpu.index: len(nvidia.ranks_on(node, [gpu])) for gpu in exclusive}
    only_one = "{allows/allow} only one process, "
    problems: list[Problem] = []
    for bad, what, more in (
        ([gpu for gpu in gpus if gpu.compute_mode == "prohibited"],
         "cannot run work: the compute mode is prohibited", lambda _: ""),
        ([gpu for gpu in exclusive if others[gpu.index]], f"{only_one}and another job's process uses {{it/them}}",
         lambda gpu: f", pids {', '.join(others[gpu.index])}"),
        ([gpu for gpu in exclusive if ranks[gpu.index] > 1], f"{only_one}but several ranks use {{it/each of them}}",
         lambda gpu: f", {ranks[gpu.index]} ranks"),
    ):  # fmt: skip
        problems += nvidia.gpu_problem(
            node, bad, what, detail=lambda gpu, more=more: f"compute mode {gpu.compute_mode}{more(gpu)}",  # type: ignore[misc]
            fix="sudo nvidia-smi -c 0 -i {ids}",
        )  # fmt: skip
    return judged(problems, ", ".join(sorted({gpu.compute_mode or "" for gpu in gpus})))


@rule(
    "DD318", "other-procs", W, "Other processes use memory on the job's GPUs",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: processes and memory; /proc/PID/cgroup",
)  # fmt: skip
def check_other_procs(node: Node) -> Answer:
    """Report memory on the job's GPUs that other processes hold."""
    gpus = [gpu for gpu in nvidia.in_use(node) if gpu.processes is not None or gpu.memory_used_bytes is not None]
    if not gpus:
        return skipped("no GPU here reports its processes")
    is_seen = nvidia.listed(node).host_pids
    if not is_seen:
        gpus = [gpu for gpu in gpus if not nvidia.is_coherent(gpu)]
        if not gpus:
            return skipped("the kernel caches files in the memory of these GPUs, and their processes are not visible")
    problems, most_bytes = [], 0
    for gpu in gpus:
        others, total = nvidia.strangers(gpu, node), gpu.memory_total_bytes
        if is_seen:
            held = sum(other.used_bytes or 0 for other in others)
        else:  # what is beyond this job's own counts
            own = sum(process.used_bytes or 0 for process in gpu.processes or () if process.ours)
            allowed = TRIAL_BYTES if known(node.gpu_trial) is not None else 0
            held = max(0, (gpu.memory_used_bytes or 0) - own - allowed)
        most_bytes = max(most_bytes, held)
        is_most = total is not None and held > MOST * total
        amount = f"{format_memory(held)} of {'memory' if total is None else format_memory(total)}"
        if is_seen and held > OTHERS_BYTES:
            pids = ",".join(str(other.pid) for other in others)
            said = ", ".join(
                f"pid {other.pid} ({other.name or 'unknown name'}) "
                f"{'memory not reported' if other.used_bytes is None else format_memory(other.used_bytes)}"
                for other in others
            )
            problems += nvidia.gpu_problem(
                node, [gpu], f"has {amount} used by other processes", detail=lambda _, said=said: said,  # type: ignore[misc]
                fix=f"ps -fp {pids}; end leftover processes", severity=E if is_most else None,
            )  # fmt: skip
        elif not is_seen and (is_most or (nvidia.is_data_center(gpu) and held > UNSEEN_BYTES)):
            problems.append(Problem(
                summary=f"{nvidia.gpu_list([gpu])} has {amount} in use by processes that are not visible from here",
                evidence=("this process runs in a container and cannot see the host's processes",),
                fix="run nvidia-smi on the host, outside the container, to find the processes",
                severity=E if is_most and nvidia.is_data_center(gpu) else W, confidence=Confidence.MEDIUM,
            ))  # fmt: skip
    most = f"at most {format_memory(most_bytes)} of a GPU"
    return judged(
        problems, f"other processes use {most}" if is_seen else f"{most} in use; its processes are not visible"
    )


@rule(
    "DD319", "zombie-ctx", W, "GPU memory is in use, but no process uses it",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: memory in use, processes",
)  # fmt: skip
def check_zombie_ctx(node: Node) -> Answer:
    """Report GPU memory that is in use although no process is on the GPU."""
    if not nvidia.listed(node).host_pids:
        return skipped("the host's processes are not visible from this container")
    gpus = [gpu for gpu in nvidia.in_use(node) if not gpu.mig_enabled and not nvidia.is_coherent(gpu)]
    readable = [gpu for gpu in gpus if gpu.processes is not None and gpu.memory_used_bytes is not None]
    if not readable:
        return skipped("no GPU here reports both its memory and its processes")
    free = [gpu for gpu in readable if not gpu.processes]
    problems = nvidia.gpu_problem(
        node, [gpu for gpu in free if (gpu.memory_used_bytes or 0) > UNSEEN_BYTES],
        "{has/have} memory in use but no process: a killed process still holds it",
        detail=lambda gpu: f"{format_memory(gpu.memory_used_bytes or 0)} in use, no process listed",
        fix="sudo fuser -v /dev/nvidia*; end leftover processes, or run sudo nvidia-smi -r -i {ids}",
    )  # fmt: skip
    return judged(problems, f"{len(free)} of {len(readable)} GPUs without a process")
