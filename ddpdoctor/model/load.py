"""What else a machine's processors do, and how fast they are let run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyCpu:
    """A processor that others used while the ranks slept."""

    cpu: int
    share: float
    """Of the time looked at, 0 to 1: processes of others, the kernel, and what a hypervisor took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Governor:
    """How the kernel chooses the clock of some processors."""

    name: str
    """scaling_governor: performance, powersave, schedutil."""
    driver: str
    """scaling_driver: intel_pstate, amd-pstate-epp, acpi-cpufreq; empty where it is not told."""
    preference: str
    """energy_performance_preference, such as balance_power; empty where there is none."""
    cpus: int
    """So many of the processors that this process may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a machine is with what is not ours: the ranks, their children and their launcher are taken off."""

    window_s: float
    """For how long was looked."""
    busy: tuple[BusyCpu, ...]
    """Those that others used at all, by number."""
    steal_share: float | None
    """Of the time that this virtual machine had work since it started, what its hypervisor gave to others instead;
    None where it is not told."""
    governors: tuple[Governor, ...]
    """Empty where the kernel does not show them, as in most virtual machines."""
