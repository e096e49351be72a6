"""Finds out whom the victims have lost: the rank or host that most of them name, and that is no victim itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Exited, Failed, Link, Nature, Waiting, Who

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.evidence import Fact
    from ddpdoctor.rules.evidence.state import RunState

_Name = tuple[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A process that others have lost."""

    rank: int | None
    host: str
    """The name of its host, else its address."""
    facts: tuple[Fact, ...]
    """What the victims say."""
    voters: int


def lost_by(state: RunState) -> Lost | None:
    """Return whom more victims name than any other, or None if that is nobody, or a victim."""
    votes: dict[_Name, dict[object, Fact]] = defaultdict(dict)
    victims = {name for fact in _victims(state) for name in _names(fact.who)}
    for fact in _victims(state):
        for name in _accused(state, fact):
            if name not in victims:
                votes[name].setdefault(_voter(fact), fact)
    ordered = sorted(votes.items(), key=lambda vote: -len(vote[1]))
    if not ordered:
        return _silent(state)
    if len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1]):
        return None
    (kind, value), those = ordered[0]
    rank = value if kind == "rank" and isinstance(value, int) else None
    host = str(value) if rank is None else state.hosts.get(rank, "")
    return Lost(rank=rank, host=host, facts=tuple(those.values()), voters=len(those))


def _silent(state: RunState) -> Lost | None:
    """Return the only rank that was seen and complains of nothing, where several others lost a rank."""
    if any(isinstance(fact, Waiting) and fact.timed_out for fact in state.facts):
        return None
    victims = {fact.who.rank: fact for fact in _victims(state) if fact.who.rank is not None}
    ends = {fact.who.rank for fact in state.facts if isinstance(fact, Failed | Exited | Waiting)}
    silent = state.seen - ends
    if len(victims) < 2 or len(silent) != 1:
        return None
    rank = next(iter(silent))
    return Lost(rank=rank, host=state.hosts.get(rank, ""), facts=tuple(victims.values()), voters=len(victims))


def _victims(state: RunState) -> Iterator[Fact]:
    for fact in state.facts:
        if (
            (isinstance(fact, Failed) and fact.nature in {Nature.PEER_LOST, Nature.TIMED_OUT})
            or (isinstance(fact, Link) and fact.victim)
            or (isinstance(fact, Waiting) and fact.timed_out)
        ):
            yield fact


def _accused(state: RunState, fact: Fact) -> Iterator[_Name]:
    """Yield the rank or host that a victim names as lost."""
    if isinstance(fact, Failed) and fact.nature is Nature.PEER_LOST:
        yield from (("host", state.host_of(Who(address=host))) for host in fact.peer_hosts)
        yield from (("rank", rank) for rank in fact.peers if not fact.peer_hosts)
    elif isinstance(fact, Link):
        to = fact.to
        rank = to.rank if to.rank is not None else _on_host(state, to)
        if rank is not None:
            yield "rank", rank
        elif (to.host or to.address) and to.local_rank is None:
            yield "host", state.host_of(to)


def _on_host(state: RunState, to: Who) -> int | None:
    """Return the rank that NCCL means by a local rank: it numbers the ranks of a host in order."""
    ranks = sorted(rank for rank, host in state.hosts.items() if host == to.host)
    place = to.local_rank
    return ranks[place] if place is not None and to.host and place < len(ranks) else None


def _names(who: Who) -> Iterator[_Name]:
    if who.rank is not None:
        yield "rank", who.rank
    yield from (("host", name) for name in (who.host, who.address) if name)


def _voter(fact: Fact) -> object:
    who = fact.who
    return who.rank if who.rank is not None else (who.host, who.pid) if who.pid is not None else fact.spot.source
