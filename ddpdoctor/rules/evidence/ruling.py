"""Decides what the evidence of a run amounts to: one cause, or what is lacking to name it.

The stronger source wins: an error of a rank itself or a line of the kernel, then calls that differ, then a circle,
then who is absent where others wait, then the network, then "all are inside". What may lie with ranks that were not
seen is no verdict.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import (
    Circle,
    Differ,
    Doing,
    ErrorLine,
    Exited,
    Failed,
    Hint,
    Inside,
    Link,
    Moving,
    Nature,
    ProcessState,
    Stacked,
    Stopped,
    Waiting,
)  # fmt: skip
from ddpdoctor.model.nccl_warnings import ONLY_LOCAL
from ddpdoctor.model.words import rank_list, verb
from ddpdoctor.rules.evidence import words
from ddpdoctor.rules.evidence.absent import find_absent
from ddpdoctor.rules.evidence.collecting import collect
from ddpdoctor.rules.evidence.lost import lost_by
from ddpdoctor.rules.evidence.roots import find_roots, precedes
from ddpdoctor.rules.evidence.state import Ruling, last_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpdoctor.rules.evidence.roots import Root
    from ddpdoctor.rules.evidence.state import RunState

# Says why the evidence does not name a cause


_TELLING = frozenset({"ras-ahead", "ras-unnamed", "damaged"})
"""Notes that say why the cause cannot be told."""


def why_unclear(state: RunState) -> str:
    """Return the most exact reason."""
    return next(reason for find in (_of_waits, _of_ends, _of_looks, _of_lines) for reason in find(state))


def _of_lines(state: RunState) -> Iterator[str]:
    lines = state.all(ErrorLine)
    if lines:
        more = f" (and {len(lines) - 1} more such lines)" if len(lines) > 1 else ""
        yield f"the log has an error that ddpdoctor does not know{more}, and no other failure: {words.quote(lines[-1])}"
    yield "no failure was found, but nothing shows that the job succeeded"


def _of_waits(state: RunState) -> Iterator[str]:
    yield from (fact.words for fact in state.all(Hint) if fact.kind in _TELLING)
    waiting = state.waiting
    if waiting:
        lacking = f"; there is no evidence from {rank_list(state.unseen)}" if state.unseen else ""
        yield f"{rank_list(waiting)} waited for other ranks, but the evidence does not show which ones{lacking}"
    yield from (fact.words for fact in state.all(Hint) if fact.kind == "told-to-dump")
    stuck = [fact for fact in state.all(Hint) if fact.kind == "watchdog-stuck"]
    ranks = sorted({fact.who.rank for fact in stuck if fact.who.rank is not None})
    yield from (f"{rank_list(ranks)}: {fact.words}" if ranks else fact.words for fact in stuck[:1])


def _of_ends(state: RunState) -> Iterator[str]:
    failed = {fact.nature: fact for fact in reversed(state.all(Failed))}
    if Nature.PEER_LOST in failed:
        yield "the evidence only has errors of ranks that lost another rank, not the failure itself"
    if Nature.TIMED_OUT in failed:
        said = words.quote(failed[Nature.TIMED_OUT])
        yield f"a wait for other ranks timed out, but the evidence does not show which ones: {said}"
    if Nature.STOPPED in failed:
        yield f"processes were told to stop, but the evidence does not show why: {words.quote(failed[Nature.STOPPED])}"
    if Nature.FOLLOWS in failed:
        said = words.quote(failed[Nature.FOLLOWS])
        yield f"the evidence only has reports of a failure, not the failure itself: {said}"
    if state.all(Link):
        yield "the evidence only shows that the other side closed connections, not why"
    if state.all(Exited):
        yield "the evidence only shows that ranks were stopped, not why"


def _of_looks(state: RunState) -> Iterator[str]:
    data = _wait_for_data(state)
    if data:
        yield f"{rank_list(data)} {verb(data, 'waits', 'wait')} for workers of a DataLoader"
    if state.all(ProcessState):
        where = "no rank was seen to wait for another" if state.all(Stacked) else "no stack of a rank was seen"
        yield f"there is no sign of progress, and {where}"
    if state.all(Moving) and not state.went_wrong and not state.all(ErrorLine):
        yield "the log ends while the job makes progress, so it is unknown whether it continued, ended or hung"


def _wait_for_data(state: RunState) -> list[int]:
    """Return the ranks that wait for workers of their DataLoaders, if all ranks do."""
    samples = last_samples(state.facts)
    return sorted(samples) if all(one.doing is Doing.DATA for one in samples.values()) else []


_FROZEN = frozenset({"T", "t"})

_KINDS = {
    "shm": "shm", "version": "version-same", "interface": "ifname-exists", "duplicate-gpu": "dup-gpu",
    "port": "port-free", "disk": "disk", "wrong-data": "wrong-data",
    "nonfinite": "nonfinite-grad", "xid": "xid", "gpu-lost": "xid",
}  # fmt: skip
"""For faults of a machine: the kind of the rule of `check-env` that a user would look for."""


_ENDS_PROCESSES = frozenset({"oom", "node-failure"})
"""Faults of a machine by which processes die at once."""


def decide(state: RunState) -> Ruling:
    """Return what the evidence of a run amounts to."""
    if state.ended_well:
        return Ruling()
    roots = find_roots(state)
    differ = _differences(state)
    if differ and not (roots and _is_older(roots[0], differ)):
        return Ruling(kind="mismatch", problem=words.mismatch(state, differ))
    if roots and roots[0].is_plain:
        return _failure(state, roots)
    for found in (
        _frozen,
        _circle,
        _alone_and_absent(roots),
        find_absent,
        _unlike_places,
        _silent_exit(roots),
        _alone(roots, vague=False),
        _interface,
        _link,
        _alone(roots, vague=True),
        _stopped,
        _inside,
        _lost,
    ):
        ruling = found(state)
        if ruling is not None:
            return ruling
    return Ruling(reason=why_unclear(state), collect=collect(state))


def _is_older(root: Root, differ: Iterable[Differ]) -> bool:
    """Return whether a failure came before ranks called different operations, and in the user's own code."""
    own = any(failed.operation is None and any(frame.user for frame in failed.frames) for failed in root.failed)
    exits = not root.failed
    return (own or exits) and not any(precedes(one, fact) for one in differ for fact in root.facts)


def _differences(state: RunState) -> list[Differ]:
    return [fact for fact in state.all(Differ) if fact.certain]


def _unlike_places(state: RunState) -> Ruling | None:
    """Return a ruling if all ranks wait, and not in the same call."""
    differ = [fact for fact in state.all(Differ) if not fact.certain]
    return Ruling(kind="mismatch", problem=words.mismatch(state, differ)) if differ else None


def _failure(state: RunState, roots: list[Root]) -> Ruling:
    root = roots[0]
    killed = not root.failed and (any(one.signal for one in root.exited) or root.memory)
    machine = next((one.kind for one in root.troubles if one.kind not in _ENDS_PROCESSES), "")
    if machine and ((not root.failed and not root.exited) or machine == "port"):
        problem = words.machine(state, root)
        return Ruling(kind="crash", problem=replace(problem, kind=_KINDS.get(machine)))
    if any(one.kind == "node-failure" for one in root.troubles):
        killed = True
    problem = words.failure(state, root, roots[1:], killed=killed)
    return Ruling(kind="killed" if killed else "crash", problem=problem)


def _frozen(state: RunState) -> Ruling | None:
    """Return a ruling if ranks are stopped by a signal or a debugger while others wait."""
    last = {fact.who.rank: fact for fact in state.all(ProcessState) if fact.who.rank is not None}
    frozen = [rank for rank, fact in last.items() if fact.letter in _FROZEN]
    if not frozen or len(frozen) == len(last):
        return None
    return Ruling(kind="stopped", problem=words.frozen(state, frozen))


def _circle(state: RunState) -> Ruling | None:
    circles = state.all(Circle)
    return Ruling(kind="deadlock", problem=words.circle(state, circles)) if circles else None


def _silent_exit(roots: list[Root]) -> Callable[[RunState], Ruling | None]:
    def found(state: RunState) -> Ruling | None:
        """Return a ruling about ranks that ended with a status and without a word, if no others failed.

        Of several that aborted, all but one are victims for sure, and the one may be elsewhere.
        """
        killed = bool(roots) and any(one.signal for one in roots[0].exited) and not roots[0].failed
        if not roots or roots[0].is_alone or (killed and len(roots) > 1):
            return None
        problem = words.failure(state, roots[0], roots[1:], killed=killed)
        return Ruling(kind="killed" if killed else "crash", problem=problem)

    return found


def _alone_and_absent(roots: list[Root]) -> Callable[[RunState], Ruling | None]:
    def found(state: RunState) -> Ruling | None:
        """Return a ruling about the one rank that others wait for, if a known error of nobody else stands alone."""
        if not roots or not roots[0].is_alone or roots[0].is_vague or roots[0].ranks:
            return None
        absent = find_absent(state)
        if absent is None or absent.problem is None or len(absent.problem.ranks) != 1:
            return None
        roots[0].ranks |= set(absent.problem.ranks)
        problem = words.failure(state, roots[0], roots[1:], killed=False)
        waited = f"its line names no rank; {absent.problem.summary}"
        return Ruling(kind="crash", problem=replace(problem, evidence=(*problem.evidence, waited)))

    return found


def _alone(roots: list[Root], *, vague: bool) -> Callable[[RunState], Ruling | None]:
    def found(state: RunState) -> Ruling | None:
        """Return a ruling about an error whose line stands alone. One that may report any other comes last."""
        if not roots or not roots[0].is_alone or roots[0].is_vague is not vague:
            return None
        return Ruling(kind="crash", problem=words.failure(state, roots[0], roots[1:], killed=False))

    return found


def _interface(state: RunState) -> Ruling | None:
    """Return a ruling if hosts gave NCCL an address that leads only to themselves, and others cannot reach them."""
    addresses = {fact.who.host: fact.who.address for fact in state.facts if fact.who.host and fact.who.address}
    alone = {host: address for host, address in addresses.items() if address.startswith(ONLY_LOCAL)}
    waits = [fact for fact in state.all(Waiting) if fact.in_init]
    links = [fact for fact in state.all(Link) if not fact.victim and fact.to.address in alone.values()]
    other_links = [fact for fact in state.all(Link) if not fact.victim and fact not in links]
    if not alone or len(addresses) < 2 or other_links or not (waits or links):
        return None
    return Ruling(kind="transport", problem=words.wrong_interface(state, alone, [*links, *waits]))


def _link(state: RunState) -> Ruling | None:
    links = [fact for fact in state.all(Link) if not fact.victim]
    return Ruling(kind="transport", problem=words.link(state, links)) if links else None


def _stopped(state: RunState) -> Ruling | None:
    """Return a ruling if somebody outside stopped the job, and nothing says that it hung or failed before."""
    stopped = state.all(Stopped)
    if not stopped or any(fact.timed_out for fact in state.all(Waiting)) or state.all(Inside):
        return None
    return Ruling(kind="killed", problem=words.stopped(state, stopped))


def _inside(state: RunState) -> Ruling | None:
    """Return a ruling if all ranks of a group are in one collective that does not complete."""
    inside = state.all(Inside)
    whole = [fact for fact in inside if fact.complete]
    if not whole:
        return None
    return Ruling(kind="transport", problem=words.inside(state, whole))


def _lost(state: RunState) -> Ruling | None:
    """Return a ruling about the rank or host that several ranks have lost."""
    lost = lost_by(state)
    if lost is None or lost.voters < 2:
        return None
    return Ruling(kind="crash", problem=words.lost(state, lost))
