"""Who waits for whom, rank by rank: what a picture of the waits is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.progress.groups import CallPosition
from ddpdoctor.rules.progress.states import Activity
from ddpdoctor.rules.progress.waits import met_peers, needed_in_init, wait_edges

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ddpdoctor.rules.progress.job_state import JobState

Targets = dict[int, frozenset[int]]
"""For each waiting rank, the ranks that it waits for."""


def find_targets(job: JobState) -> Targets:
    """Return for each waiting rank the ranks that its call lacks. Ranks that wait for nobody known are left out.

    If ranks wait in calls that do not match, each side waits for the blamed one. Ranks in the same call share one set.
    """
    found = _targets_in_calls(job) | _targets_in_init(job)
    found |= {rank: whom for rank, whom in _targets_in_conflict(job).items() if rank not in found}
    return found or {rank: frozenset({peer}) for rank, peer in met_peers(job.states).items()}


def _targets_in_calls(job: JobState) -> Targets:
    edges = wait_edges(job.states, job.positions)
    absent = frozenset(range(job.world)) - job.states.keys()
    lacking: dict[Hashable, frozenset[int]] = {}
    for node, nexts in edges.items():
        if isinstance(node, int):
            continue
        missing = absent.intersection(node.group.members) if absent and isinstance(node, CallPosition) else frozenset()
        ranks = frozenset(one for one in nexts if isinstance(one, int))
        earlier = (lacking.get(one, frozenset()) for one in nexts if not isinstance(one, int))
        lacking[node] = ranks.union(missing, *earlier)
    found: Targets = {}
    for rank, nexts in edges.items():
        for one in nexts if isinstance(rank, int) else ():
            whom = frozenset({one}) if isinstance(one, int) else lacking.get(one, frozenset())
            if isinstance(rank, int) and whom:
                found[rank] = whom
    return found


def _targets_in_init(job: JobState) -> Targets:
    needed = frozenset(needed_in_init(job.states, job.world))
    inside = (rank for rank, state in job.states.items() if state.doing is Activity.INIT)
    return dict.fromkeys(inside, needed) if needed else {}


def _targets_in_conflict(job: JobState) -> Targets:
    """Return the sides of a conflict: the others wait for the blamed ranks; if all are blamed, for each other."""
    if job.conflict is None:
        return {}
    blamed = frozenset(job.conflict.blame.ranks)
    inside = [part.rank for part in job.conflict.parts if part.rank in job.states and job.states[part.rank].waiting]
    others = dict.fromkeys((rank for rank in inside if rank not in blamed), blamed)
    return others or {rank: blamed - {rank} for rank in inside if blamed - {rank}}
