"""Chooses the dumps of one job, and names the files it leaves out: old dumps, other jobs, second dumps of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.sides import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.flight import FlightDump

LONG_AGO_S = 3600
"""Our choice: twice the longest time limit that torch sets by itself. Ranks of a job that hangs stop within it."""


def choose_dumps(dumps: Sequence[FlightDump]) -> tuple[list[FlightDump], dict[str, str]]:
    """Return the dumps of the newest job, and for each other file the reason why it is left out."""
    left_out: dict[str, str] = {}
    recent = _recent(dumps, left_out)
    kept: list[FlightDump] = []
    for rank, those in grouped((dump.rank, dump) for dump in _of_one_size(recent, left_out)).items():
        newest = max(those, key=lambda dump: (_last(dump), dump.has_frames))
        kept += those if rank is None else [newest]
        for dump in those if rank is not None else ():
            if dump is not newest and _of_both_looks(dump) != _of_both_looks(newest):
                left_out[dump.spot.source] = (
                    f"left out: another dump of rank {rank}; {newest.spot.source} is the newest"
                )
    return kept, left_out


def _of_both_looks(dump: FlightDump) -> str:
    """Return what the files have in common in which `attach` saved a rank's dumps of its two looks."""
    return dump.spot.source.replace("look_2/", "look_1/")


def _last(dump: FlightDump) -> int:
    return dump.last_ns or 0


def _recent(dumps: Sequence[FlightDump], left_out: dict[str, str]) -> list[FlightDump]:
    """Return the dumps without calls, and those whose last calls are about as recent as the others'."""
    dated = sorted((dump for dump in dumps if dump.last_ns), key=_last, reverse=True)
    kept = dated[:1]
    for dump in dated[1:]:
        gap_s = (_last(kept[-1]) - _last(dump)) / 1e9
        if gap_s > LONG_AGO_S:
            older_s = (_last(dated[0]) - _last(dump)) / 1e9
            left_out[dump.spot.source] = f"left out: its last call is {_age(older_s)} older than those of the others"
        else:
            kept.append(dump)
    return kept + [dump for dump in dumps if not dump.last_ns]


def _age(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days" if seconds > 3 * 86400 else f"{seconds / 3600:.0f} h"


def _of_one_size(dumps: Iterable[FlightDump], left_out: dict[str, str]) -> list[FlightDump]:
    """Return the dumps with the most common world size."""
    those = list(dumps)
    sizes = grouped((dump.world_size, dump) for dump in those if dump.world_size)
    most = max(sizes, key=lambda size: (len(sizes[size]), max(map(_last, sizes[size]))), default=None)
    for size, others in sizes.items():
        for dump in others if size != most else ():
            left_out[dump.spot.source] = f"left out: of a job of {size} ranks, and the others of one of {most}"
    return [dump for dump in those if dump.spot.source not in left_out]
