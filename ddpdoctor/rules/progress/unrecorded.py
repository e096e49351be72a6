"""DD901: a rank of which not all could be seen."""

from __future__ import annotations

from dataclasses import replace

from ddpdoctor.model.facts import Life, Rank
from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.nodes import Presence
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.registry import rule
from ddpdoctor.rules.ruling import Ruling

from . import evidence as say
from .scene import Cause, Scene
from .words import verb


@rule("DD901", "not-recorded", Severity.INFO, "A rank could not be recorded")
def check_recorded(scene: Scene) -> Ruling:
    """Report ranks that ran without a recorder, or with a damaged one.

    ## What it means

    Training was not disturbed, but of these ranks only the process itself was seen: a verdict knows less.

    ## How it is recognised

    The recorder left word why it could not start, or a process ran and no record of it was found. Ranks of the world
    that no process here stands for run elsewhere, unless the launcher has said that all are here.

    ## How sure

    High.

    ## What to do

    Free space where the run folder and `/dev/shm` are. A rank that runs under `python -I`, `-E` or `-S`, or with
    another `PYTHONPATH`, does not load the recorder: start it without. For ranks elsewhere start `ddpdoctor wrap` there
    too: each looks after its own host.

    ## Example

        rank 3 could not be recorded: no space left on device
    """
    unseen: dict[str, list[int]] = {}
    for number in sorted(scene.states):
        why = _why(scene.rank(number))
        if why:
            unseen.setdefault(why, []).append(number)
    found = [_finding(scene, why, tuple(ranks)) for why, ranks in unseen.items()]
    return Ruling(findings=(*found, *_elsewhere(scene)))


def _elsewhere(scene: Scene) -> list[Finding]:
    """Report the ranks that no process here stands for; where the user told of other nodes, only if it matters."""
    there = tuple(sorted(set(range(scene.world)) - set(scene.states)))
    expected = scene.job.nnodes > 1 and (scene.cause is Cause.NONE or _all_have_one(scene))
    if scene.sees_all or expected or not scene.states or not there:
        return []
    they = verb(there, "it", "them")
    if any(state.rank.initialized for state in scene.states.values()):
        where = f"{verb(there, 'runs', 'run')} where ddpdoctor cannot see {they} (another host or container)"
    else:
        where = f"{verb(there, 'was', 'were')} not seen here; another host or container may have {they}"
    fix = "start `ddpdoctor wrap` there too"
    summary = f"{rank_list(there)} of {scene.world} {where}: {fix}"
    return [replace(_finding(scene, "", there), hosts=(), summary=summary, fix=fix)]


def _all_have_one(scene: Scene) -> bool:
    """Return whether each node was heard of, so that there is a ``wrap`` on it, whatever has come of it."""
    members = scene.job.members
    return members is not None and all(node.presence is not Presence.ABSENT for node in members.nodes)


def _why(rank: Rank) -> str:
    if rank.lost:
        return rank.lost
    if rank.life is Life.NEVER_STARTED or rank.recorded:
        return ""
    return "no recorder was loaded into it"


def _finding(scene: Scene, why: str, ranks: tuple[int, ...]) -> Finding:
    return Finding(
        code="DD901",
        kind="not-recorded",
        severity=Severity.INFO,
        confidence=Confidence.HIGH,
        ranks=ranks,
        hosts=say.hosts_of(scene, ranks),
        summary=f"{rank_list(ranks)} could not be recorded, at least not in full: {why}",
        fix="free space where the run folder is, and start Python without -I, -E and -S",
    )
