"""The data of the pictures of a job that nobody watched: what its evidence says of times and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.pictures.classes import blamed_ranks, rows_by_rank
from ddpdoctor.diagnose.pictures.data import PictureData, encode_timeline, walled
from ddpdoctor.diagnose.pictures.flight import flight_timeline
from ddpdoctor.diagnose.pictures.waits import fold_waits
from ddpdoctor.model.codec import encode
from ddpdoctor.model.evidence import Absent, Circle
from ddpdoctor.model.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.findings import Finding, RankRow
    from ddpdoctor.rules.evidence.state import RunState


def evidence_pictures(state: RunState, rows: Iterable[RankRow], verdict: Finding | None) -> PictureData:
    """Return the entries ``timeline`` and ``waits`` of a report's data. They are None where nothing is known."""
    return walled(lambda: _make(state, rows, verdict))


def _make(state: RunState, rows: Iterable[RankRow], verdict: Finding | None) -> dict[str, Any]:
    by_rank = rows_by_rank(rows)
    cause = verdict if verdict is not None and verdict.severity is Severity.ERROR else None
    waits = fold_waits(_targets(state, blamed_ranks(cause)), by_rank, blamed_ranks(cause))
    return {
        "timeline": encode_timeline(flight_timeline(state.run.dumps, by_rank, cause)),
        "waits": None if waits is None else encode(waits),
    }


def _targets(state: RunState, blamed: frozenset[int]) -> dict[int, frozenset[int]]:
    """Return who waits for whom by the sources; if they name nobody, those who wait do so for the blamed ranks."""
    found: dict[int, set[int]] = {}
    for circle in state.all(Circle):
        for rank, _, other in circle.links:
            found.setdefault(rank, set()).add(other)
    for absent in state.all(Absent):
        whom = absent.who.rank
        for rank in absent.waiters:
            if whom is not None and whom != rank:
                found.setdefault(rank, set()).add(whom)
    known = {rank: frozenset(whom) for rank, whom in found.items()}
    return known or ({rank: blamed for rank in state.waiting if rank not in blamed} if blamed else {})
