"""DD608: ranks that wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.registry import rule

from . import evidence as say
from .closed import closed, stalled_in
from .places import places
from .scene import Ruling

if TYPE_CHECKING:
    from .scene import Scene


@rule("DD608", "deadlock", Severity.ERROR, "Ranks wait for each other in a circle")
def check_deadlock(scene: Scene) -> Ruling:
    """Report ranks of which each waits for a call that another will only make later.

    ## What it means

    Two groups are used in opposite order, or two ranks both receive (or both send) first.

    ## How it is recognised

    Every rank waits, each for a rank that waits in another group or for another peer; none is outside.

    ## How sure

    Medium.

    ## What to do

    Use groups in the same order on all ranks. Pair `send` with `recv`, or use `batch_isend_irecv`.

    ## Example

        ranks 0 and 1 wait for each other: each is in recv, and nobody sends
    """
    waiters = closed(scene)
    if waiters is None:
        return Ruling(skipped="somebody is to blame who waits for nobody, or nobody waits")
    if stalled_in(scene):
        return Ruling(skipped="some wait in a collective that all of its ranks have come to")
    groups = {position.group for position in scene.positions.values()}
    circle = _circle(scene)
    if not circle and len(groups) < 2:
        return Ruling()
    if not scene.stands_still(()) or not set(waiters) <= scene.quiet:
        return Ruling(inconclusive="some ranks still make progress")
    blamed = circle or waiters
    summary = f"{rank_list(blamed)} wait for each other"
    return Ruling(findings=(_finding(scene, blamed, summary),), certain=True)


def _circle(scene: Scene) -> tuple[int, ...]:
    """Return the ranks of a circle of point-to-point waits, or none."""
    held = scene.waits.blocked_by_peer
    seen: set[int] = set()
    for start in held:
        path: list[int] = []
        number: int | None = start
        while number is not None and number not in seen:
            seen.add(number)
            path.append(number)
            number = held.get(number)
        if number is not None and number in path:
            return tuple(sorted(path[path.index(number) :]))
    return ()


def _finding(scene: Scene, blamed: tuple[int, ...], summary: str) -> Finding:
    sites = {n: say.line_at(scene.states[n]) for n in blamed}
    return Finding(
        code="DD608",
        kind="deadlock",
        severity=Severity.ERROR,
        confidence=Confidence.MEDIUM,
        ranks=blamed,
        hosts=say.hosts_of(scene, blamed),
        where=tuple(place for n, frame in sites.items() for place in places(n, [frame])[:1]),
        step=say.step_of(scene, blamed),
        summary=summary,
        evidence=(*say.classes(scene, blamed), *say.others(scene, blamed)),
        fix="use groups and peers in the same order on all ranks",
    )
