"""DD608 and DD611, in a first form: ranks that wait for each other, or all in one collective."""

from __future__ import annotations

from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.rules.registry import rule

from . import evidence as say
from .places import places
from .scene import Cause, Ruling, Scene
from .states import Doing
from .words import rank_list


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
    waiters = _closed(scene)
    if waiters is None:
        return Ruling(skipped="somebody is to blame who waits for nobody, or nobody waits")
    groups = {position.group for position in scene.positions.values()}
    circle = _circle(scene)
    if not circle and len(groups) < 2:
        return Ruling()
    if not scene.stands_still(()) or not set(waiters) <= scene.quiet:
        return Ruling(inconclusive="some ranks still make progress")
    blamed = circle or waiters
    summary = f"{rank_list(blamed)} wait for each other"
    return Ruling(findings=(_finding(scene, "DD608", "deadlock", blamed, summary),), certain=True)


@rule("DD611", "transport", Severity.ERROR, "All ranks are inside the same collective and it does not complete")
def check_transport(scene: Scene) -> Ruling:
    """Report a collective that all ranks have come to and that does not end.

    ## What it means

    No rank is late. The data do not get through: a firewall, a wrong interface, a dead link, a device that hangs.

    ## How it is recognised

    Every member of the group is inside the collective with the same number, and nobody makes progress.

    ## How sure

    Low: it may be one very large or slow collective.

    ## What to do

    Test the network between the nodes, set `NCCL_SOCKET_IFNAME` or `GLOO_SOCKET_IFNAME`, and read
    `NCCL_DEBUG=INFO`'s lines.

    ## Example

        all 4 ranks are inside collective 812 of group 0, and it does not complete
    """
    waiters = _closed(scene)
    if waiters is None:
        return Ruling(skipped="somebody is to blame who waits for nobody, or nobody waits")
    if not scene.sees_all:
        return Ruling(inconclusive="ranks of other nodes were not seen")
    places_in = set(scene.positions.values())
    if len(places_in) != 1 or set(scene.positions) != set(waiters):
        return Ruling()
    position = places_in.pop()
    if not set(position.group.members) <= set(waiters) or not scene.stands_still(()):
        return Ruling()
    if not set(waiters) <= scene.quiet or not scene.waited_long():
        return Ruling(inconclusive="some ranks still make progress")
    number = f"collective {position.seq}" if position.seq is not None else "one collective"
    summary = f"all {len(waiters)} ranks are inside {number} of group {position.group.name}, and it does not complete"
    computing = any(scene.states[n].doing is Doing.NATIVE for n in waiters)
    finding = _finding(scene, "DD611", "transport", waiters, summary)
    return Ruling(findings=(finding,), certain=not computing)


def _closed(scene: Scene) -> tuple[int, ...] | None:
    """Return the waiting ranks where none waits for anybody outside, and nothing else explains the wait."""
    waits = scene.waits
    if scene.cause is not Cause.HANG or not waits.waiters or waits.blockers or (waits.absent and scene.sees_all):
        return None
    frozen = any(state.doing is Doing.STOPPED for state in scene.states.values())
    return None if frozen else waits.waiters


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


def _finding(scene: Scene, code: str, kind: str, blamed: tuple[int, ...], summary: str) -> Finding:
    sites = {n: say.line_at(scene.states[n]) for n in blamed}
    return Finding(
        code=code,
        kind=kind,
        severity=Severity.ERROR,
        confidence=Confidence.MEDIUM if kind == "deadlock" else Confidence.LOW,
        ranks=blamed,
        hosts=say.hosts_of(scene, blamed),
        where=tuple(place for n, frame in sites.items() for place in places(n, [frame])[:1]),
        step=say.step_of(scene, blamed),
        summary=summary,
        evidence=(*say.classes(scene, blamed), *say.others(scene, blamed)),
        fix="use groups and peers in the same order on all ranks"
        if kind == "deadlock"
        else "test the network between the ranks, and see NCCL_DEBUG=INFO",
    )
