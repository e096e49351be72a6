"""Compares a bench with a saved one, size by size and never by an average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Change, Comparison
from ddpdoctor.model.launch import find_variable
from ddpdoctor.rules.bandwidth.sweeps import curve_of, time_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.model.bandwidth import Bench, BenchSettings, Measurement, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The part of a saved report that a later bench can be compared with."""

    name: str
    """The file, as the user gave it."""
    results: tuple[Measurement, ...]
    members: tuple[Member, ...]
    settings: BenchSettings


def compare(bench: Bench, baseline: Baseline, fail_below: float | None) -> Comparison:
    """Compare case by case. Runs with different numbers of ranks share no case; the differences then say why."""
    then = (
        {(*curve_of(one), one.size_bytes): one for one in baseline.results}
        if len(baseline.members) == len(bench.members)
        else {}
    )
    pairs = [(now, then.get((*curve_of(now), now.size_bytes))) for now in bench.results]
    return Comparison(
        baseline=baseline.name,
        differences=find_differences(bench, baseline),
        changes=tuple(_change(now, former, fail_below) for now, former in pairs if former is not None),
        missing=sum(former is None for _, former in pairs),
    )


def cannot_tell(change: Change, fail_below: float) -> bool:
    """Return whether noise makes it impossible to say that a size is not below the limit.

    The interval contains the limit, and either the size looks slower, or the interval is so wide that even twice the
    allowed loss would go unnoticed. Our choice: a gate that passes such a size would pass anything.
    """
    straddles = change.ratio_low < fail_below <= change.ratio_high
    return straddles and (change.ratio < fail_below or change.ratio_low < 1 - 2 * (1 - fail_below))


def find_differences(bench: Bench, baseline: Baseline) -> tuple[str, ...]:
    """Return what differs between the two runs, each as "torch 2.12.0 then, 2.13.0 now"."""
    now, then = bench.members, baseline.members
    found = [
        _differ("ranks", str(len(then)), str(len(now))),
        _differ("backend", baseline.settings.backend, bench.settings.backend),
        *(_differ(name, _all(then, value), _all(now, value)) for name, value in _OF_MEMBERS),
        _differ("buffers", *("cold" if one.settings.cold else "warm" for one in (baseline, bench))),
        _differ("budget", f"{baseline.settings.budget_s:g} s", f"{bench.settings.budget_s:g} s"),
        *_variables(then, now),
    ]
    return tuple(one for one in found if one)


_OF_MEMBERS: tuple[tuple[str, Callable[[Member], str]], ...] = (
    ("hosts", lambda member: member.host),
    ("device", lambda member: member.device_name),
    ("ranks on each GPU", lambda member: str(member.gpu_ranks)),
    ("torch", lambda member: member.torch),
    ("NCCL", lambda member: member.nccl or "none"),
    ("driver", lambda member: member.driver or "none"),
    ("ddpdoctor", lambda member: member.version),
)


def _change(now: Measurement, then: Measurement, fail_below: float | None) -> Change:
    now_low, now_high = time_bounds(now)
    then_low, then_high = time_bounds(then)
    ratio_high = then_high / now_low
    return Change(
        collective=now.collective,
        dtype=now.dtype,
        redop=now.redop,
        mode=now.mode,
        in_place=now.in_place,
        size_bytes=now.size_bytes,
        now_us=now.p50_us,
        then_us=then.p50_us,
        ratio=then.p50_us / now.p50_us,
        ratio_low=then_low / now_high,
        ratio_high=ratio_high,
        below=fail_below is not None and ratio_high < fail_below,
    )


def _all(members: Iterable[Member], value: Callable[[Member], str]) -> str:
    return ", ".join(dict.fromkeys(map(value, members)))


def _variables(then: tuple[Member, ...], now: tuple[Member, ...]) -> list[str]:
    """Compare the variables of the lowest ranks. Another check makes sure that all ranks have the same."""
    before, after = (_bearing(members[0].variables) if members else {} for members in (then, now))
    return [
        _differ(name, before.get(name, "not set"), after.get(name, "not set")) for name in sorted({*before, *after})
    ]


def _bearing(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables that can affect bandwidth, without those that only control logging."""
    kinds = {name: known.kind for name in variables if (known := find_variable(name)) is not None}
    return {name: value for name, value in variables.items() if kinds.get(name) != "debug"}


def _differ(name: str, then: str, now: str) -> str:
    return "" if then == now else f"{name}: {then} then, {now} now"
