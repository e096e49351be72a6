"""Finds the failure that refers to no other rank. Lost peers, stops and errors after a time limit are consequences.

Times are compared on one host's clock only, and lines within one file only. Order between hosts comes from who names
whom.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Exited, Fact, Failed, Link, Nature, Stopped, Trouble, Waiting, Who
from ddpdoctor.model.known_errors import find_known
from ddpdoctor.model.words import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.rules.evidence.state import RunState


FATAL = frozenset({"SIGKILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"})
_KILLED_FOR_MEMORY = "oom"
# Faults that all processes have alike, if it is not one host's.
_ENVIRONMENT = frozenset({"shm", "version", "interface"})
_NONFINITE = "nonfinite"
# Faults that are one, though several processes report them.
_ALIKE = _ENVIRONMENT | {"duplicate-gpu", "port", _NONFINITE}
_GPU = frozenset({"xid", "gpu-lost"})
# Signals that ranks of one machine get alike: no room in memory that they share, an instruction that it lacks.
_OF_MACHINES = frozenset({"SIGBUS", "SIGILL"})
_DIGITS = re.compile(r"\d+")
_Name = tuple[str, object]


@dataclass(slots=True, kw_only=True)
class Root:
    """A failure that a rank, or a host, had by itself. Several facts may speak of it."""

    ranks: set[int] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    failed: list[Failed] = field(default_factory=list)
    exited: list[Exited] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)

    def name(self, who: Who) -> Root:
        """Note a rank or host that it is known to have."""
        self.ranks |= {who.rank} if who.rank is not None else set()
        self.hosts |= {who.host or who.address} if who.host or who.address else set()
        return self

    def take(self, other: Root) -> None:
        """Make one failure of both."""
        self.ranks |= other.ranks
        self.hosts |= other.hosts
        self.failed += other.failed
        self.exited += other.exited
        self.troubles += other.troubles

    @property
    def facts(self) -> list[Fact]:
        """All that speaks of it, the plainest first."""
        return [*self.failed, *self.troubles, *self.exited]

    @property
    def is_plain(self) -> bool:
        """There is more than a status 1 without a word, or an error whose line stands alone, or an abort.

        An abort without a word is how torch's watchdog ends victims.
        """
        told = any(not one.alone for one in self.failed)
        signals = any(one.signal not in {"", "SIGABRT"} or one.frames for one in self.exited)
        return told or bool(self.troubles) or signals

    @property
    def is_alone(self) -> bool:
        """All that speaks of it is an error whose line stands alone."""
        return bool(self.failed) and not self.is_plain and not self.exited

    @property
    def is_vague(self) -> bool:
        """The error is unknown, or may be the report of any other."""
        known = find_known(f"{self.failed[0].type}: {self.failed[0].message}") if self.failed else None
        return known is None or known.vague

    @property
    def memory(self) -> bool:
        """Memory ran out."""
        said = any(one.memory for one in self.failed) or any(one.memory for one in self.exited)
        return said or any(one.kind == _KILLED_FOR_MEMORY for one in self.troubles)

    @property
    def is_first(self) -> bool:
        """The launcher calls it the first failure."""
        return any(one.first for one in self.exited)


def find_roots(state: RunState) -> list[Root]:
    """Return the failures that refer to no other rank, the earliest first as far as that is known."""
    stopped = bool(state.all(Stopped))
    roots: dict[object, Root] = defaultdict(Root)
    timeouts = [fact for fact in state.all(Waiting) if fact.timed_out]
    lost = {Nature.PEER_LOST, Nature.TIMED_OUT}
    victims = {fact.who for fact in state.all(Failed) if fact.nature in lost}
    for failed in state.all(Failed):
        if failed.nature is not Nature.OWN:
            continue
        unnamed, rank = failed.alone and failed.who.rank is None, failed.who.rank
        limits = [limit for limit in timeouts if unnamed or (rank is not None and limit.who.rank == rank)]
        # It may be the report of any other error, which the same process has told more exactly.
        told = failed.who in victims and (failed.alone or failed.who != Who())
        known = find_known(f"{failed.type}: {failed.message}") if told else None
        if not any(precedes(limit, failed) for limit in limits) and not (known is not None and known.vague):
            roots[_key(failed)].name(failed.who).failed.append(failed)
    for exited in state.all(Exited):
        if _is_own_exit(state, exited, stopped=stopped):
            roots[_key(exited)].name(exited.who).exited.append(exited)
    _attach_bare(roots)
    for trouble in state.all(Trouble):
        if trouble.fatal:
            _add_trouble(roots, trouble, state)
    found = [root for root in roots.values() if root.facts]
    for root in found:
        if root.is_alone:  # several lines without a traceback: one that is known explains the others
            root.failed.sort(key=lambda one: find_known(f"{one.type}: {one.message}") is None)
    plain = _join_alike([root for root in found if root.is_plain], state)
    plain = [root for root in plain if root.troubles[:1] == [] or root.troubles[0].kind != _NONFINITE] or plain
    times = [root.facts[0].time for root in plain or found]
    clocks = {time.clock for time in times if time is not None}
    timed = len(clocks) == 1 and None not in times

    def place(root: Root) -> tuple[float, ...]:
        """Return the place by time on one clock, else as the launcher says, else by lines of one file.

        Of errors whose lines stand alone, a known one of a known rank comes first.
        """
        fact = root.facts[0]
        return (
            2 * root.is_vague + (not root.ranks) if root.is_alone else 2 * (bool(plain) < (not root.failed)),
            fact.time.seconds if timed and fact.time is not None else 0.0,
            0.0 if root.is_first else 1.0,
            0.0 if root.failed or not root.exited else 0.5,
            float(fact.spot.line or 0),
        )

    ordered = sorted(plain or found, key=place)
    rest = []
    for root in ordered[
        1:
    ]:  # the same error as the first is one bug on several ranks, or one line says two were killed
        first = ordered[0]
        ends = [{(end.spot, end.signal) for end in one.exited if end.signal} for one in (first, root)]
        if first.failed and root.failed:
            alike = _shape(first.failed[0]) == _shape(root.failed[0])
        else:
            same = {signal for _, signal in ends[0]} & {signal for _, signal in ends[1]} & _OF_MACHINES
            alike = not first.failed and not root.failed and (bool(same) or not ends[0].isdisjoint(ends[1]))
        if alike:
            first.take(root)
        else:
            rest.append(root)
    return [*ordered[:1], *rest]


def _join_alike(roots: list[Root], state: RunState) -> list[Root]:
    """Make one fault of those of the environment that every process reports. It is no rank's and no host's."""
    merged: dict[tuple[str, ...], Root] = {}
    for root in roots:
        key = tuple(sorted({one.kind for one in root.troubles if one.kind in _ALIKE}))
        if not key or root.failed:
            merged["", str(id(root))] = root
        elif key in merged:
            merged[key].take(root)
        else:
            merged[key] = root
    for key, root in merged.items():
        if set(key) <= _ENVIRONMENT and len(root.ranks) > 1 and root.ranks >= state.seen:
            root.ranks, root.hosts = set(), set()
    return list(merged.values())


def precedes(one: Fact, other: Fact) -> bool | None:
    """Return whether one fact is older than the other, or None if that cannot be told."""
    same_clock = one.time is not None and other.time is not None and one.time.clock == other.time.clock
    if one.time is not None and other.time is not None and same_clock and one.time.seconds != other.time.seconds:
        return one.time.seconds < other.time.seconds
    if one.spot.source == other.spot.source and one.spot.line is not None and other.spot.line is not None:
        return one.spot.line < other.spot.line
    return None


def _is_own_exit(state: RunState, exited: Exited, *, stopped: bool) -> bool:
    """Return whether a bad end is no consequence of another rank's failure, and no order from outside."""
    if exited.memory:
        return True
    if exited.by_launcher or exited.signal == "SIGTERM" or (stopped and exited.signal == "SIGKILL"):
        return False
    rank = exited.who.rank
    errors = state.of(rank, Failed) if rank is not None else []
    waited = state.of(rank, Waiting) if rank is not None else []
    follows = any(error.nature is not Nature.OWN for error in errors) or any(one.timed_out for one in waited)
    explained = any(error.nature is Nature.OWN for error in errors)
    if exited.signal:
        return exited.signal in FATAL and not (follows and exited.signal in {"SIGABRT", "SIGKILL"})
    return not follows or explained


def _key(fact: Fact) -> object:
    who = fact.who
    if who.rank is not None:
        return who.rank
    return (who.host or who.address, who.pid, who.local_rank)


def _attach_bare(roots: dict[object, Root]) -> None:
    """Give errors and signals without a rank to the ranks that they ended, if that is plain."""
    bare = [root for root in roots.values() if root.failed and not root.ranks]
    silent = [root for root in roots.values() if root.exited and not root.failed and root.ranks]
    silent = silent or [root for root in roots.values() if root.exited and not root.failed]
    silent = [root for root in silent if all(one.code is not None for one in root.exited)]
    errors = {(one.type, _DIGITS.sub("", one.message)) for root in bare for one in root.failed}
    if len(errors) == 1 and silent:  # ranks that ended with a status and without a word
        first = [root for root in silent if root.is_first]
        several = sum(len(root.failed) for root in bare) > 1
        for root in silent if several or not first else first:
            root.failed.extend(bare[0].failed[:1])
        for root in bare:
            root.failed.clear()
    for root in [root for root in roots.values() if root.exited and not root.ranks and not root.hosts]:
        signals = {one.signal for one in root.exited}
        same = [one for one in roots.values() if one.ranks and any(end.signal in signals for end in one.exited)]
        if len(same) == 1 and signals != {""}:  # both the rank and its launcher tell of it
            same[0].exited.extend(root.exited)
            root.exited.clear()


def _add_trouble(roots: dict[object, Root], trouble: Trouble, state: RunState) -> None:
    """Add a fault of a machine to the failure that it explains, else as a failure of its own."""
    key = _key(trouble)
    if isinstance(key, int) and key in roots:
        roots[key].troubles.append(trouble)
        return
    candidates = [root for root in roots.values() if root.facts and _explains(trouble, root, state)]
    if len(candidates) == 1:
        candidates[0].troubles.append(trouble)
        candidates[0].hosts |= {trouble.who.host} if trouble.who.host else set()
    elif not candidates:
        root = roots[key].name(trouble.who)
        root.troubles.append(trouble)
        if trouble.who.rank is None or trouble.who.rank in trouble.ranks:  # else these are ranks of a smaller group
            root.ranks |= {rank for rank in trouble.ranks if state.world is None or rank < state.world}


def _explains(trouble: Trouble, root: Root, state: RunState) -> bool:
    hosts = root.hosts | {state.hosts[rank] for rank in root.ranks if rank in state.hosts}
    if trouble.who.host and hosts and trouble.who.host not in hosts:
        return False
    if trouble.kind == _KILLED_FOR_MEMORY:
        killed = any(one.signal == "SIGKILL" or one.code == 137 for one in root.exited)
        return killed or any(one.in_worker for one in root.failed)
    if trouble.kind in _GPU:
        return any("CUDA" in one.type or "CUDA" in one.message for one in root.failed)
    return trouble.kind == "shm" and any(one.signal == "SIGBUS" for one in root.exited)


def _shape(failed: Failed) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """Return what makes two errors the same bug: type, message without numbers, and the innermost user line."""
    message = "".join(char for char in failed.message if not char.isdigit())
    own = [(frame.file, frame.line) for frame in failed.frames if frame.user][-1:]
    return failed.type, message, tuple(own)


def victims_of(state: RunState, blamed: Iterable[int]) -> dict[str, list[int]]:
    """Return the ranks whose errors follow from the failure of others, by what they say."""
    words = {
        Nature.PEER_LOST: "lost another rank",
        Nature.TIMED_OUT: "timed out while waiting",
        Nature.STOPPED: "was told to stop",
    }
    told = [(words[fact.nature], fact.who.rank) for fact in state.all(Failed) if fact.nature in words]
    told += [(words[Nature.TIMED_OUT], limit.who.rank) for limit in state.all(Waiting) if limit.timed_out]
    found = grouped((key, rank) for key, rank in told if rank is not None and rank not in blamed)
    return {key: sorted(set(ranks)) for key, ranks in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A process that others have lost."""

    rank: int | None
    host: str  # the name of its host, else its address
    facts: tuple[Fact, ...]  # what the victims say, each one once


def lost_by(state: RunState) -> Lost | None:
    """Return whom more victims name than any other, or None if that is nobody, or a victim."""
    votes: dict[_Name, dict[object, Fact]] = defaultdict(dict)
    victims = {name for fact in _victims(state) for name in _names(fact.who)}
    for fact in _victims(state):
        for name in _accused(state, fact):
            if name not in victims:
                who = fact.who
                votes[name].setdefault(
                    who.rank
                    if who.rank is not None
                    else (who.host, who.pid)
                    if who.pid is not None
                    else fact.spot.source,
                    fact,
                )
    ordered = sorted(votes.items(), key=lambda vote: -len(vote[1]))
    if not ordered:
        return _silent(state)
    if len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1]):
        return None
    (kind, value), those = ordered[0]
    rank = value if kind == "rank" and isinstance(value, int) else None
    host = str(value) if rank is None else state.hosts.get(rank, "")
    return Lost(rank=rank, host=host, facts=tuple(those.values()))


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
    return Lost(rank=rank, host=state.hosts.get(rank, ""), facts=tuple(victims.values()))


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
        rank, place = to.rank, to.local_rank
        if rank is None and place is not None and to.host:  # NCCL numbers the ranks of a host in order
            ranks = sorted(one for one, host in state.hosts.items() if host == to.host)
            rank = ranks[place] if place < len(ranks) else None
        if rank is not None:
            yield "rank", rank
        elif (to.host or to.address) and to.local_rank is None:
            yield "host", state.host_of(to)


def _names(who: Who) -> Iterator[_Name]:
    if who.rank is not None:
        yield "rank", who.rank
    yield from (("host", name) for name in (who.host, who.address) if name)
