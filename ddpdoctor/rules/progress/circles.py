"""DD608 and DD611: ranks that wait for each other, or that are all inside a collective that does not complete."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.registry import rule

from . import evidence as say
from .places import places
from .scene import Cause, Ruling, Scene
from .states import Doing
from .waits import by_position
from .words import verb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .groups import Group, Position

MOST_TOLD = 4
"""Groups that a summary names."""


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
    if _stalled(scene):
        return Ruling(skipped="some wait in a collective that all of its ranks have come to")
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

    Every member of the group is inside the collective with the same number, or inside one that follows it, and nobody
    makes progress. Ranks that wait elsewhere wait for these.

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
    stalled = _stalled(scene)
    if not stalled and not scene.sees_all:
        return Ruling(inconclusive="ranks of other nodes were not seen")
    if not stalled or not scene.stands_still(()):
        return Ruling()
    if not set(waiters) <= scene.quiet or not scene.waited_long():
        return Ruling(inconclusive="some ranks still make progress")
    blamed = tuple(sorted({member for position in stalled for member in position.group.members}))
    computing = any(scene.states[n].doing is Doing.NATIVE for n in waiters)
    finding = _finding(scene, "DD611", "transport", blamed, _stalled_words(scene, stalled))
    return Ruling(findings=(finding,), certain=not computing)


def _stalled(scene: Scene) -> tuple[Position, ...]:
    """Return the pending collectives that all ranks of their group have come to: of each group the earliest.

    A rank may be done with it and wait in a later one, as the root of a broadcast is before the data have arrived.
    """
    by_group: dict[Group, list[int]] = defaultdict(list)
    for number, position in sorted(scene.positions.items()):
        if number in position.group.members:
            by_group[position.group].append(number)
    found = []
    for group, inside in by_group.items():
        waited_in = {scene.positions[number] for number in inside}
        if len(inside) == len(group.members) and (len(waited_in) == 1 or _numbered(scene, inside)):
            found.append(min(waited_in, key=lambda position: position.seq or 0))
    return tuple(found)


def _numbered(scene: Scene, numbers: Iterable[int]) -> bool:
    """Return whether it is certain in which collective each rank is: the counter of C++ may be one off."""
    positions, states = scene.positions, scene.states
    return all(positions[n].seq is not None and states[n].doing is Doing.COLLECTIVE for n in numbers)


def _stalled_words(scene: Scene, stalled: Sequence[Position]) -> str:
    inside = by_position(scene.positions)
    told = [_one_stalled(scene, position, inside[position]) for position in stalled[:MOST_TOLD]]
    left = len(stalled) - len(told)
    more = f", and {left} more groups likewise" if left else ""
    return f"{'; '.join(told)}{more}, and {'it does' if len(stalled) == 1 else 'they do'} not complete"


def _one_stalled(scene: Scene, position: Position, inside: list[int]) -> str:
    number = f"collective {position.seq}" if position.seq is not None else "one collective"
    who = f"all {len(inside)} ranks" if len(inside) == len(scene.waits.waiters) > 1 else rank_list(inside)
    come = "" if len(inside) == len(position.group.members) else ", which all of the group have come to"
    return f"{who} {verb(inside, 'is', 'are')} inside {number} of group {position.group.name}{come}"


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
