"""The load that other work puts on a machine's processors, and their frequency settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyCpu:
    """A processor that others used while the ranks slept."""

    cpu: int
    share: float
    """Share of the sampled time, 0 to 1, that other processes, the kernel and a hypervisor used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Governor:
    """How the kernel sets the frequency of some processors."""

    name: str
    """scaling_governor: performance, powersave, schedutil."""
    driver: str
    """scaling_driver: intel_pstate, amd-pstate-epp, acpi-cpufreq; empty if unknown."""
    preference: str
    """energy_performance_preference, such as balance_power; empty if there is none."""
    cpus: int
    """To how many of this process's allowed processors this applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy other work keeps a machine. The ranks, their children and their launcher do not count."""

    window_s: float
    """Length of the sample."""
    busy: tuple[BusyCpu, ...]
    """Processors with any other use, by number."""
    steal_share: float | None
    """The share of its busy time since boot that this virtual machine lost to others by its hypervisor, or None if
    unknown."""
    governors: tuple[Governor, ...]
    """Empty if the kernel does not show them, as in most virtual machines."""
