"""Why a rank is slower than the others: its input, its batches, its computation, pauses, or the load of its host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.steps import Speed

MOST = 0.5
"""A cause must explain half of what the others wait for. Our choice: then no other cause explains more."""
LARGER = 1.2
"""Batches, or processor time, this much larger count as different. Our choice: the last batch of an epoch is smaller
and changes no median."""
COMPUTES = 0.5
"""From this share of processor time, a part of a step is computation."""
BUSY = 0.02
"""If ranks wait for a core in a larger share of their time, other programs use their cores. Our choice: on an idle
machine they wait less. With a busy loop on each core, ranks that mostly sleep wait in 3 to 30 % of it."""

CROWDED = 0.1
"""If all ranks wait for a core in such a share of their time, their loader workers do too. Our choice: five times
``BUSY``, so that a slow disk is still found on a machine with some other load."""


class SlowCause(Enum):
    """What makes a rank slow."""

    COLLECTIONS = "garbage collections"
    HOST_LOAD = "another process on its core"
    BATCH = "larger batches"
    INPUT = "its input"
    WORK = "more computation"
    COMPUTE = "slower computation"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowReason:
    """The cause, a sentence that shows it, and what to do."""

    cause: SlowCause
    seen: str
    fix: str


def find_slow_reason(rank: Rank, others: Sequence[Rank], cost_ms: float) -> SlowReason | None:
    """Return why a rank costs the others ``cost_ms`` a step, or None if what was recorded does not tell."""
    own = rank.speed
    theirs = [other.speed for other in others if other.speed is not None]
    if own is None or not own.kept.numbers or not theirs:
        return None
    needed_ms = MOST * cost_ms
    for find in (_collections, _host_load, _batch, _input, _computation):
        reason = find(own, theirs, needed_ms)
        if reason is not None:
            return reason
    return None


def shares_busy_cores(rank: Rank, others: Sequence[Rank], cost_ms: float) -> bool:
    """Return whether a rank is behind only because it waits for a core, as the other ranks do too.

    Which of them is behind then changes with what else runs on the machine. A loader that does not compute counts
    too, if the main thread waits for a core as long: the loader's workers wait for the same cores.
    """
    reason = find_slow_reason(rank, others, cost_ms)
    waits = [_queued_share(other.speed) for other in others if other.speed is not None]
    if reason is None or not waits or rank.speed is None:
        return False
    if reason.cause is SlowCause.INPUT:
        computes = median(rank.speed.kept.cpu_ms["data"]) >= COMPUTES * _part(rank.speed, "data")
        waits_as_long = _queued_ms(rank.speed) >= MOST * cost_ms
        return not computes and waits_as_long and median(waits) >= CROWDED
    return reason.cause is SlowCause.HOST_LOAD and median(waits) >= BUSY


def _collections(own: Speed, theirs: Sequence[Speed], needed_ms: float) -> SlowReason | None:
    mine, usual = _part(own, "gc"), median(_part(one, "gc") for one in theirs)
    if mine - usual < needed_ms:
        return None
    return SlowReason(
        cause=SlowCause.COLLECTIONS,
        seen=f"Python's garbage collector takes {mine:.0f} ms per step here, and {usual:.0f} ms on the others",
        fix="call gc.freeze() after setup, and run the collector on all ranks in the same step",
    )


def _host_load(own: Speed, theirs: Sequence[Speed], needed_ms: float) -> SlowReason | None:
    mine, usual = _queued_ms(own), median(_queued_ms(one) for one in theirs)
    computes_more = _on_core_ms(own) > LARGER * median(_on_core_ms(one) for one in theirs)
    if mine - usual < needed_ms or computes_more:  # who computes more also waits more for a core that others use
        return None
    return SlowReason(
        cause=SlowCause.HOST_LOAD,
        seen=f"its main thread waits {mine:.0f} ms per step for a core, and on the others {usual:.0f} ms",
        fix="find out what else runs on its cores (top -H), or pin each rank to its own cores",
    )


def _batch(own: Speed, theirs: Sequence[Speed], _needed_ms: float) -> SlowReason | None:
    mine, usual = median(own.kept.input_numel), median(median(one.kept.input_numel) for one in theirs)
    if not usual or mine < LARGER * usual:
        return None
    rows, usual_rows = median(own.kept.input_rows), median(median(one.kept.input_rows) for one in theirs)
    what = (
        f"{rows:.0f} rows, and those of the others {usual_rows:.0f}"
        if rows != usual_rows
        else (f"{mine:.0f} elements, and those of the others {usual:.0f}")
    )
    return SlowReason(
        cause=SlowCause.BATCH,
        seen=f"its batches have {what}",
        fix="give all ranks batches of the same size: the same batch_size, or batches of similar lengths",
    )


def _input(own: Speed, theirs: Sequence[Speed], needed_ms: float) -> SlowReason | None:
    mine, usual = _part(own, "data"), median(_part(one, "data") for one in theirs)
    if mine - usual < needed_ms:
        return None
    cpu = median(own.kept.cpu_ms["data"]) / mine
    how = f"{cpu:.0%} of it computing" if cpu >= COMPUTES else "waiting for files or workers"
    return SlowReason(
        cause=SlowCause.INPUT,
        seen=f"its loader takes {mine:.0f} ms per batch ({how}), and on the others {usual:.0f} ms",
        fix="check where this rank reads its data, and give its loader more workers",
    )


def _computation(own: Speed, theirs: Sequence[Speed], needed_ms: float) -> SlowReason | None:
    for part in ("forward", "backward"):
        mine, usual = _part(own, part), median(_part(one, part) for one in theirs)
        if mine - usual < needed_ms:
            continue
        cpu = median(own.kept.cpu_ms[part]) - median(median(one.kept.cpu_ms[part]) for one in theirs)
        times = f"its {part} takes {mine:.0f} ms, and on the others {usual:.0f} ms"
        if cpu >= COMPUTES * (mine - usual):
            return SlowReason(
                cause=SlowCause.WORK,
                seen=f"{times}; it uses {cpu:.0f} ms more CPU time, so it computes more",
                fix="give all ranks the same work: inputs of the same size, and no extra branch on one rank",
            )
        return SlowReason(
            cause=SlowCause.COMPUTE,
            seen=f"{times}; it uses only {cpu:.0f} ms more CPU time, so it waits or its CPU or GPU is slower",
            fix=(
                "look for waits on this rank only; run `ddpdoctor check-env` to find a throttled device or other "
                "processes"
            ),
        )
    return None


def _part(speed: Speed, part: str) -> float:
    return median(speed.kept.parts_ms[part])


def _queued_ms(speed: Speed) -> float:
    """Return how long the main thread waits for a core in a step."""
    return speed.core_time.queued_ms / speed.count if speed.core_time is not None and speed.count else 0.0


def _on_core_ms(speed: Speed) -> float:
    """Return how long the main thread runs in a step."""
    return speed.core_time.on_core_ms / speed.count if speed.core_time is not None and speed.count else 0.0


def _queued_share(speed: Speed) -> float:
    time = speed.core_time
    return time.queued_ms / time.elapsed_ms if time is not None and time.elapsed_ms else 0.0
