"""DD312 and DD313: GPUs that are slowed down, or soon will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, judged, skipped
from ddpdoctor.rules.environment.devices import gpu_problem, in_use, is_data_center, is_laptop
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.gpus import Gpu
    from ddpdoctor.model.node import Node
    from ddpdoctor.rules.answers import Problem

HARDWARE_SLOWDOWN = {0x08: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
SOFTWARE_SLOWDOWN = {0x20: "software thermal slowdown"}
POWER_CAP = {0x04: "power cap"}
"""Bits of nvmlClocksEventReasons in nvml.h."""
IDLE = 0x01
NEAR_SLOWDOWN_C = 5
"""Our choice: a GPU this close reaches the threshold within minutes under load."""
POWER_TOLERANCE_MW = 1_000
"""Our choice: NVML rounds limits."""
COOL = "nvidia-smi -q -d TEMPERATURE -i {ids}; then check the cooling"


@rule(
    "DD312", "throttle", Severity.ERROR, "A GPU is throttled right now",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: clocks event reasons",
)  # fmt: skip
def check_throttle(node: Node) -> Answer:
    """Report GPUs that their hardware or driver is slowing down right now.

    ## What it means

    All ranks wait for the slowest in every step: one GPU at half its clock halves the job.

    ## How it is recognized

    The check reads bits of NVML's clocks event reasons. Hardware slowdown (0x8), hardware thermal slowdown (0x40) and
    power brake (0x80: the server's power supply asks for less) are errors on data-center GPUs. On others they are
    warnings, because laptops on battery and workstations do this by design. Software thermal slowdown (0x20) is a
    warning. The power cap (0x4) is normal under full load, and is an info. Source: nvml.h; gpud's hw-slowdown and
    azurehpc-health-checks do the same.

    ## What else looks like it

    An idle GPU has low clocks and the reason "idle", which is fine. A GPU that is idle now may still be slowed down
    under load: this check only sees the present state.

    ## What to do

    If the GPU is hot, check fans, filters, the room's temperature, and the heat sink, which may be loose. For a power
    brake, check the power supplies and the rack's power limit.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.clock_event_reasons is not None]
    if not gpus:
        return skipped("no GPU here reports the reasons for its clock")
    idle = sum(1 for gpu in gpus if (gpu.clock_event_reasons or 0) & IDLE)
    reasons = ", ".join(sorted({hex(gpu.clock_event_reasons or 0) for gpu in gpus}))
    return judged(list(_slowdowns(node, gpus)), f"reasons {reasons}; {idle} of {len(gpus)} idle")


def _slowdowns(node: Node, gpus: list[Gpu]) -> Iterator[Problem]:
    hard = [gpu for gpu in gpus if _named(gpu, HARDWARE_SLOWDOWN)]
    for those, severity in (
        ([gpu for gpu in hard if is_data_center(gpu)], None),
        ([gpu for gpu in hard if not is_data_center(gpu)], Severity.WARNING),
    ):
        what = f"{{is/are}} throttled by {{its/their}} hardware: {_why(those)}"
        fix = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {ids}; then check cooling and power supplies"
        yield from gpu_problem(node, those, what, detail=_state, fix=fix, severity=severity)
    warm = [gpu for gpu in gpus if _named(gpu, SOFTWARE_SLOWDOWN) and gpu not in hard]
    what = "{is/are} throttled by the driver because of heat"
    yield from gpu_problem(node, warm, what, detail=_state, fix=COOL, severity=Severity.WARNING)
    capped = [gpu for gpu in gpus if _named(gpu, POWER_CAP) and gpu not in hard and gpu not in warm]
    what = "{runs/run} at the power limit, as under full load: a process is using {it/them} now"
    fix = "run nvidia-smi -i {ids} to see the process"
    yield from gpu_problem(node, capped, what, detail=_state, fix=fix, severity=Severity.INFO)


def _named(gpu: Gpu, bits: dict[int, str]) -> list[str]:
    return [name for bit, name in bits.items() if (gpu.clock_event_reasons or 0) & bit]


def _why(gpus: list[Gpu]) -> str:
    return ", ".join(dict.fromkeys(name for gpu in gpus for name in _named(gpu, HARDWARE_SLOWDOWN)))


def _state(gpu: Gpu) -> str:
    heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c} °C"
    power = "" if gpu.power_limit_mw is None else f", power limit {gpu.power_limit_mw / 1000:.0f} W"
    return f"clocks event reasons {hex(gpu.clock_event_reasons or 0)}{heat}{power}"


@rule(
    "DD313", "temp-power", Severity.WARNING, "A GPU is close to thermal throttling, or its power limit is lowered",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: temperature and threshold, enforced and default power limit",
)  # fmt: skip
def check_temp_power(node: Node) -> Answer:
    """Report GPUs within 5 °C of thermal throttling, and GPUs with a lowered power limit.

    ## What it means

    At the slowdown temperature the GPU halves its clock. A lowered power limit lowers the clock under load, and the job
    runs at the speed of the most limited GPU.

    ## How it is recognized

    The check compares the temperature with NVML's slowdown threshold, with a margin of 5 °C. It compares the power
    limit in force with the default, with a tolerance of 1 W. Both numbers are our choice. On laptops the limit changes
    by itself, so there it is an info.

    ## What else looks like it

    Somebody may have set the limit on purpose, for cooling or cost. If it is equal on all GPUs of all nodes, it makes
    no straggler.

    ## What to do

    Set the limit with `nvidia-smi -pl`. It is lost at a reboot unless a service sets it again.
    """
    gpus = in_use(node)
    hot = [gpu for gpu in gpus if _is_hot(gpu)]
    limited = [gpu for gpu in gpus if _is_limited(gpu)]
    readable = [gpu for gpu in gpus if None not in {gpu.temperature_c, gpu.power_limit_mw}]
    if not readable and not hot and not limited:
        return skipped("no GPU here reports its temperature and its power limit")
    what = f"{{is/are}} within {NEAR_SLOWDOWN_C} °C of thermal throttling"
    problems = gpu_problem(node, hot, what, detail=_heat, fix=COOL)
    for those, severity in (
        ([gpu for gpu in limited if not is_laptop(gpu)], Severity.WARNING),
        ([gpu for gpu in limited if is_laptop(gpu)], Severity.INFO),
    ):
        watts = next(((gpu.default_power_limit_mw or 0) // 1000 for gpu in those), 0)
        what = "{has/have} a lowered power limit, and will be slow under load"
        fix = f"sudo nvidia-smi -i {{ids}} -pl {watts}"
        problems += gpu_problem(node, those, what, detail=_power, fix=fix, severity=severity)
    temperatures = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    seen = f"at most {max(temperatures)} °C" if temperatures else "temperatures not reported"
    return judged(problems, f"{seen}, power limits {_limits(gpus)}")


def _is_hot(gpu: Gpu) -> bool:
    if gpu.temperature_c is None or not gpu.slowdown_temperature_c:
        return False
    return gpu.temperature_c >= gpu.slowdown_temperature_c - NEAR_SLOWDOWN_C


def _is_limited(gpu: Gpu) -> bool:
    if gpu.power_limit_mw is None or gpu.default_power_limit_mw is None:
        return False
    return gpu.power_limit_mw < gpu.default_power_limit_mw - POWER_TOLERANCE_MW


def _heat(gpu: Gpu) -> str:
    return f"{gpu.temperature_c} °C, slowdown at {gpu.slowdown_temperature_c} °C"


def _power(gpu: Gpu) -> str:
    return f"limit {(gpu.power_limit_mw or 0) / 1000:.0f} W, default {(gpu.default_power_limit_mw or 0) / 1000:.0f} W"


def _limits(gpus: tuple[Gpu, ...]) -> str:
    watts = sorted({gpu.power_limit_mw // 1000 for gpu in gpus if gpu.power_limit_mw is not None})
    return f"{', '.join(map(str, watts))} W" if watts else "not reported"
