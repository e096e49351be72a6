"""The evidence of one run as the rules see it: facts joined by rank, what is lacking, and the failures that came first.

A failure that refers to no other rank is a root. Lost peers, stops and errors after a time limit are consequences.
Times are compared on one host's clock only, and lines within one file only. Order between hosts follows from which
rank names which.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.known_errors import find_known
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.logs.calls import Kind, compare_calls, compare_stacks, compare_waits
from ddpdoctor.rules.logs.flight import compare_flight

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.rules.answers import Problem

    class FactsByKind(Protocol):
        """The facts of each class of facts."""

        def __getitem__(self, kind: type[Kind], /) -> list[Kind]: ...


Named = TypeVar("Named", int, str)
RAS = "ras"  # the kind of note that every report gives
_OF_COUNTS = frozenset({"ras-ahead", "ras-unnamed"})
# Facts about ranks whose own evidence need not have been given.
_OF_OTHERS = (lf.Absent, lf.Circle, lf.Differ, lf.Inside)
_WAITED = frozenset({lf.Nature.PEER_LOST, lf.Nature.TIMED_OUT})  # failures of ranks that waited for others


def set_apart_handled(facts: Sequence[lf.Fact]) -> tuple[lf.Fact, ...]:
    """Return the facts, with notes in place of the errors after which the same writer went on or ended well."""
    ends = [fact for fact in facts if isinstance(fact, lf.Finished) and not fact.process_only]
    signs = [*ends, *(fact for fact in facts if isinstance(fact, lf.Moving))]
    exits = [fact.who.rank for fact in facts if isinstance(fact, lf.Exited) and fact.code is not None]
    found: list[lf.Fact] = []
    for fact in facts:
        failed = fact if isinstance(fact, lf.Failed) else None
        # Somebody who is late, at the start or later, holds up the whole job as long as it lasts.
        is_late = isinstance(fact, lf.Absent) and fact.expected
        of_job = is_late or (isinstance(fact, lf.Waiting) and fact.in_init and not fact.timed_out)
        # A process may have ended by this error; what it had still to print may come after the error.
        explains = failed is not None and any(rank in (fact.who.rank, None) or fact.who.rank is None for rank in exits)
        own = of_job or failed is not None or (isinstance(fact, lf.Exited) and fact.who == lf.Who())
        at_once = failed is not None and failed.alone  # one step is enough after a line that need not be a failure
        after = (
            sign.steady_from if isinstance(sign, lf.Moving) and not at_once else sign.spot.line
            for sign in signs
            if sign.spot.source == fact.spot.source and (of_job or sign.who == fact.who)
        )
        here = fact.spot.line
        if own and not explains and here is not None and any(line is not None and line > here for line in after):
            said = f"{failed.type} was caught: {failed.message}".rstrip(": ") if failed is not None else fact.said
            common: dict[str, Any] = {"who": fact.who, "spot": fact.spot, "time": fact.time, "said": fact.said}
            found.append(lf.Hint(words=f"{said}; the job continued", kind="handled", **common))
        else:
            found.append(fact)
    return tuple(found)


def resolve(facts: Sequence[lf.Fact], world: int | None) -> tuple[lf.Fact, ...]:
    """Return the facts with the global rank and the host of their processes, as far as other facts give them."""
    facts = [fact for fact in facts if not isinstance(fact, lf.Size) or fact.ranks <= lf.MOST_RANKS]
    ranks: dict[object, set[int]] = defaultdict(set)  # what each name of a process stands for
    named: dict[object, set[str]] = defaultdict(set)
    for who in {fact.who for fact in facts}:
        for name in _names(who):
            ranks[name] |= {who.rank} if who.rank is not None else set()
            named[name] |= {who.host} if who.host else set()
        if who.rank is not None and who.host:
            named["rank", who.rank].add(who.host)
        if who.address and who.host:
            named["address", who.address].add(who.host)
    members = {fact.group: fact.members for fact in facts if isinstance(fact, lf.Size) and fact.members}
    tasks, locals_ = _tasks_are_ranks(facts, world), _locals_are_ranks(facts, world)
    found = []
    gpus: dict[tuple[str, str], int | None] = {}  # a GPU that several ranks had, one after the other, is nobody's
    for fact in facts:
        if isinstance(fact, lf.Seen) and fact.gpu and fact.who.rank is not None:
            key, user = (fact.who.host, fact.gpu), fact.who.rank
            gpus[key] = user if gpus.get(key, user) == user else None
    hosts = frozenset(fact.who.host for fact in facts if fact.who.host)
    for fact in facts:
        who = fact.who
        rank, place = who.rank, who.group_rank
        if rank is None and place is not None:  # in the default group both are equal
            known = members.get(who.group)
            rank = place if not who.group else known[place] if known and place < len(known) else None
        if rank is None:
            rank = _only(ranks, *_names(who))
        if rank is None and tasks:
            rank = who.task
        host = who.host or (_only(named, ("address", who.address)) if who.address else None) or ""
        if not host and rank is not None:
            host = _only(named, ("rank", rank)) or ""
        if rank is None and locals_:
            rank = who.local_rank
        if isinstance(fact, lf.Trouble) and not host:
            # The name of the file or of its folder may name a host, if others tell of a host of this name.
            source = fact.spot.source
            words = {*re.split(r"[/_.\s]", source), *re.split(r"[/_.\s-]", source), *re.split(r"[/_\s]", source)}
            host = next(iter(words & hosts)) if len(words & hosts) == 1 else ""
        if isinstance(fact, lf.Trouble) and fact.gpu and rank is None:
            # Without a host it must be the only GPU at this place.
            users = [(on, number) for (on, bus), number in gpus.items() if bus == fact.gpu and host in (on, "")]
            host, rank = users[0] if len(users) == 1 else (host, None)
        who = replace(who, rank=rank, host=host)
        found.append(fact if who == fact.who else replace(fact, who=who))
    return tuple(found)


def _only(table: Mapping[object, set[Named]], *names: object) -> Named | None:
    """Return the rank of the first name that stands for exactly one. A name with two ranks is ambiguous."""
    return next((next(iter(table[name])) for name in names if len(table.get(name, ())) == 1), None)


def number_stacks(facts: Sequence[lf.Fact]) -> tuple[lf.Fact, ...]:
    """Return the facts with ranks for processes of which only stacks tell: a launcher starts ranks in order.

    Processes of one host are in the order of their pids, those of several files with equal pids in that of the names.
    """
    own = [fact for fact in facts if isinstance(fact, lf.Stacked) and not fact.worker]
    if any(fact.who.rank is not None for fact in own):
        return tuple(facts)
    hosts = {fact.who.host for fact in own}
    pids = {(fact.spot.source, fact.who.pid) for fact in own if fact.who.pid is not None}
    names = sorted(pids, key=lambda name: (name[1], _natural(name[0])))
    if len(hosts) > 1 or len({pid for _, pid in pids}) < len(pids):
        names.sort(key=lambda name: (_natural(name[0]), name[1]))
    if len(names) < 2 or len({pid for _, pid in pids}) not in {1, len(pids)}:
        return tuple(facts)
    ranks: dict[tuple[str, int | None], int] = {name: rank for rank, name in enumerate(names)}
    found = list(facts)
    for at, fact in enumerate(facts):
        if isinstance(fact, lf.Stacked) and fact.who.rank is None:
            rank = ranks.get((fact.spot.source, fact.who.pid))
            found[at] = replace(fact, who=replace(fact.who, rank=rank))
    return tuple(found)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _names(who: lf.Who) -> list[tuple[object, ...]]:
    where = who.host or who.address
    known = [(kind, number) for kind, number in (("pid", who.pid), ("local", who.local_rank)) if number is not None]
    return [
        name for kind, number in known for name in ((kind, where, number), (kind, number)) if where or len(name) < 3
    ]


def _locals_are_ranks(facts: Iterable[lf.Fact], world: int | None) -> bool:
    """Return whether local ranks are ranks, as they are on one node.

    Nothing may point to a second node: another host, a rank that is not a local rank, or a local rank in two places.
    """
    facts = [fact for fact in facts if fact.who != lf.Who()]
    hosts, places = set(), defaultdict(set)
    for fact in facts:
        if fact.who.local_rank is not None:
            hosts.add(fact.who.host or fact.who.address)
            source = fact.spot.source
            folder = source.rpartition("/")[0]
            places[fact.who.local_rank].add(folder if re.search(r"attempt_\d+/\d+$", folder) else source)
    size = max(places, default=-1) + 1
    ranks = {fact.who.rank for fact in facts if fact.who.rank is not None}
    pairs = {(fact.who.rank, fact.who.local_rank) for fact in facts if None not in {fact.who.rank, fact.who.local_rank}}
    alone = len(hosts - {""}) < 2 and all(len(those) == 1 for those in places.values())
    equal = all(rank == local for rank, local in pairs) and all(rank < size for rank in ranks)
    return alone and equal and (world is None or world < 2 * size)


def _tasks_are_ranks(facts: Iterable[lf.Fact], world: int | None) -> bool:
    """Return whether Slurm's tasks are ranks, as with one for each GPU: nothing may speak against it."""
    facts = list(facts)
    if any(isinstance(fact, lf.Launched) and fact.starts_several for fact in facts):
        return False
    # No file may tell of a task, and of ranks, if the rank of this number wrote into other files only.
    ranks, tasks = defaultdict(set), defaultdict(set)
    for fact in facts:
        if fact.who.rank is not None:
            ranks[fact.spot.source].add(fact.who.rank)
        elif fact.who.task is not None:
            tasks[fact.spot.source].add(fact.who.task)
    every = {rank for those in ranks.values() for rank in those}
    if any(ranks[source] and (those & every) - ranks[source] for source, those in tasks.items()):
        return False
    pairs = {(fact.who.task, fact.who.rank) for fact in facts if fact.who.task is not None}
    if any(rank is not None and rank != task for task, rank in pairs):
        return False
    locals_ = {fact.who.local_rank for fact in facts if fact.who.task is not None and fact.who.local_rank}
    return not locals_ and (world is None or max((task for task, _ in pairs if task is not None), default=0) < world)


def join_reports(facts: Sequence[lf.Fact]) -> tuple[lf.Fact, ...]:
    """Return the facts, with those that the last two reports agree on. Counts differ briefly in any job."""
    sources = list(dict.fromkeys(fact.spot.source for fact in facts if isinstance(fact, lf.Hint) and fact.kind == RAS))
    if len(sources) < 2:
        return tuple(facts)
    former, last = (_lowest_numbers(facts, source) for source in sources[-2:])
    stale = [fact for fact in facts if _is_of_counts(fact) and fact.spot.source in sources[:-1]]
    left = [fact for fact in facts if not any(fact is former for former in stale)]
    if former and (former.keys().isdisjoint(last) or any(last[key] > former[key] for key in former.keys() & last)):
        spot = next(fact.spot for fact in reversed(facts) if fact.spot.source == sources[-1])
        moved = lf.Moving(spot=spot, said="the counts of operations grew between two reports")
        return (*(fact for fact in left if not _is_of_counts(fact)), moved)
    stood = former.keys() & last.keys()
    return tuple(replace(fact, certain=True) if stood and isinstance(fact, lf.Absent) else fact for fact in left)


def _lowest_numbers(facts: Iterable[lf.Fact], source: str) -> dict[str, int]:
    """Return the lowest number of each operation in which ranks of a communicator differ."""
    found: dict[str, int] = {}
    for fact in facts:
        if fact.spot.source != source or not _is_of_counts(fact):
            continue
        if isinstance(fact, lf.Reached) and fact.enqueued is not None:
            found[fact.group] = min(found.get(fact.group, fact.enqueued), fact.enqueued)
        elif isinstance(fact, lf.Waiting) and fact.operation.seq is not None:
            found[fact.operation.words()] = fact.operation.seq
    return found


def _is_of_counts(fact: lf.Fact) -> bool:
    if isinstance(fact, lf.Absent):
        return fact.shown is lf.Shown.COUNTS
    if isinstance(fact, lf.Reached):
        return fact.group.startswith("comm ")
    if isinstance(fact, lf.Waiting):
        return fact.operation.group.startswith("comm ") and not fact.timed_out and not fact.in_init
    return isinstance(fact, lf.Hint) and fact.kind in _OF_COUNTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What is wrong, or why that is unknown."""

    kind: str = ""  # the kind of the rule that answers; empty: none does
    problem: Problem | None = None
    reason: str = ""  # why there is no verdict; empty: there is one, or nothing is wrong
    collect: tuple[str, ...] = ()  # if there is no verdict: what to collect, as instructions, the most useful first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that the rules look at."""

    logs: lf.Logs
    run: lf.LoggedRun
    world: int | None
    facts: tuple[lf.Fact, ...]  # with ranks and hosts joined, and with what comparing them gave
    seen: frozenset[int]  # the ranks of which evidence was given
    hosts: Mapping[int, str]  # the hosts of ranks, as far as they are known
    ruling: Ruling = Ruling()
    all: FactsByKind = field(default_factory=lambda: defaultdict[Any, Any](list), init=False, repr=False)
    _by_rank: dict[tuple[int | None, type], list[Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the facts, of which a large job has many thousands."""
        for fact in self.facts:
            self.all[type(fact)].append(fact)
            self._by_rank.setdefault((fact.who.rank, type(fact)), []).append(fact)

    def of(self, rank: int, kind: type[Kind]) -> list[Kind]:
        return self._by_rank.get((rank, kind), [])

    def samples_of(self, rank: int) -> list[lf.Stacked]:
        """Return the stacks of a rank itself, not those of its workers."""
        return [fact for fact in self.of(rank, lf.Stacked) if not fact.worker]

    @property
    def unseen(self) -> tuple[int, ...]:
        """The ranks of the world without evidence; empty if the size of the world is unknown."""
        return tuple(rank for rank in range(self.world or 0) if rank not in self.seen)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait for others, or waited until a time limit."""
        found = {fact.who.rank for fact in self.all[lf.Waiting]}
        found |= {fact.who.rank for fact in self.all[lf.Failed] if fact.nature in _WAITED}
        for fact in self.facts:
            found |= set(fact.ranks) if isinstance(fact, lf.Inside) else set()
            found |= set(fact.waiters) if isinstance(fact, lf.Absent) else set()
        return tuple(sorted(rank for rank in found if rank is not None))

    def refusals(self) -> list[tuple[lf.Refused, list[int]]]:
        """Return what a look could not use, each once, with the ranks for which it is the same."""
        no_rank, no_spot = lf.Who(), lf.Spot(source="")
        alike = grouped((replace(fact, who=no_rank, spot=no_spot), fact.who.rank) for fact in self.all[lf.Refused])
        return [(fact, sorted({rank for rank in ranks if rank is not None})) for fact, ranks in alike.items()]

    def hosts_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the hosts of ranks, sorted, without those that are unknown."""
        return tuple(sorted({self.hosts[rank] for rank in ranks if self.hosts.get(rank)}))

    def host_of(self, who: lf.Who) -> str:
        """Return the name of a process's host, else its address; empty if neither is known."""
        named = {fact.who.host for fact in self.facts if who.address and fact.who.address == who.address}
        named.discard("")
        return who.host or (named.pop() if len(named) == 1 else who.address)

    @property
    def numbered_by(self) -> str:
        """What ranks are taken from, if no evidence tells a rank or the world size: local ranks, or Slurm's tasks."""
        if self.world is not None or any(fact.who.rank is not None for fact in self.run.facts):
            return ""
        known = [fact.who for fact in self.facts if fact.who.rank is not None]
        if not known:
            return ""
        return "Slurm's task" if any(who.task is not None for who in known) else "the local rank"

    @property
    def moves(self) -> bool:
        """Two samples show progress. Step counts in a log end with the log."""
        return any(not fact.logged for fact in self.all[lf.Moving])

    @property
    def went_wrong(self) -> bool:
        """A fact reports a failure, a wait or a difference."""
        bad = (lf.Failed, lf.Exited, lf.Waiting, lf.Stopped, *_OF_OTHERS)
        if any(isinstance(fact, lf.Link) for fact in self.facts) and not self.all[lf.Finished]:
            return True  # connections also close where a job ends well, but then it says so
        return any(fact.fatal for fact in self.all[lf.Trouble]) or any(isinstance(fact, bad) for fact in self.facts)


def build_run_state(logs: lf.Logs) -> RunState:
    """Join the facts of the last run, and compare its ranks."""
    run = logs.runs[-1]
    sizes = [fact.ranks for fact in run.facts if isinstance(fact, lf.Size) and not fact.group]
    sizes += [dump.world_size for dump in run.dumps if dump.world_size]
    world = max((size for size in sizes if size <= lf.MOST_RANKS), default=None)
    read = join_reports(set_apart_handled(number_stacks(resolve(run.facts, world))))
    compared = [*compare_stacks(read, world), *compare_waits(read, world), *compare_calls(read)]
    compared += compare_flight(run.dumps, world) if run.dumps else []
    found = [fact.ranks for fact in compared if isinstance(fact, lf.Size) and not fact.group]
    world = max([world or 0, *found]) or None
    facts = resolve([*read, *compared], world)
    hosts: dict[int, set[str]] = defaultdict(set)
    for fact in facts:
        if fact.who.rank is not None and fact.who.host:
            hosts[fact.who.rank].add(fact.who.host)
    seen = {fact.who.rank for fact in facts if not isinstance(fact, (*_OF_OTHERS, lf.Launched, lf.Restarted))}
    seen |= {dump.rank for dump in run.dumps}
    seen |= {rank for fact in facts if isinstance(fact, lf.Inside) for rank in fact.ranks}
    named = {rank: next(iter(names)) for rank, names in hosts.items() if len(names) == 1}
    every = frozenset(rank for rank in seen if rank is not None)
    return RunState(logs=logs, run=run, world=world, facts=facts, seen=every, hosts=named)


def last_samples(facts: Sequence[lf.Fact]) -> dict[int, lf.Stacked]:
    """Return the last stack of each rank's own main thread."""
    stacks = (fact for fact in facts if isinstance(fact, lf.Stacked) and not fact.worker)
    return {fact.who.rank: fact for fact in stacks if fact.who.rank is not None}


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
    """A failure that originated on a rank or host. Several facts may describe it."""

    ranks: set[int] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    failed: list[lf.Failed] = field(default_factory=list)
    exited: list[lf.Exited] = field(default_factory=list)
    troubles: list[lf.Trouble] = field(default_factory=list)

    def name(self, who: lf.Who) -> Root:
        self.ranks |= {who.rank} if who.rank is not None else set()
        self.hosts |= {who.host or who.address} if who.host or who.address else set()
        return self

    def take(self, other: Root) -> None:
        self.ranks |= other.ranks
        self.hosts |= other.hosts
        self.failed += other.failed
        self.exited += other.exited
        self.troubles += other.troubles

    @property
    def facts(self) -> list[lf.Fact]:
        return [*self.failed, *self.troubles, *self.exited]

    @property
    def is_plain(self) -> bool:
        """There is more than a status 1 without a word, or an error whose line stands alone, or an abort.

        An abort without a word is how torch's watchdog ends victims.
        """
        told = any(not failure.alone for failure in self.failed)
        signals = any(process.signal not in {"", "SIGABRT"} or process.frames for process in self.exited)
        return told or bool(self.troubles) or signals

    @property
    def is_alone(self) -> bool:
        return bool(self.failed) and not self.is_plain and not self.exited

    @property
    def is_vague(self) -> bool:
        """The error is unknown, or may only report another one."""
        known = find_known(f"{self.failed[0].type}: {self.failed[0].message}") if self.failed else None
        return known is None or known.vague

    @property
    def memory(self) -> bool:
        said = any(failure.memory for failure in self.failed) or any(process.memory for process in self.exited)
        return said or any(trouble.kind == _KILLED_FOR_MEMORY for trouble in self.troubles)

    @property
    def is_first(self) -> bool:
        return any(process.first for process in self.exited)


def find_roots(state: RunState) -> list[Root]:
    """Return the failures that refer to no other rank, the earliest first as far as that is known."""
    roots: dict[object, Root] = defaultdict(Root)
    timeouts = [fact for fact in state.all[lf.Waiting] if fact.timed_out]
    victims = {fact.who for fact in state.all[lf.Failed] if fact.nature in _WAITED}
    for failed in state.all[lf.Failed]:
        if failed.nature is not lf.Nature.OWN:
            continue
        unnamed, rank = failed.alone and failed.who.rank is None, failed.who.rank
        limits = [limit for limit in timeouts if unnamed or (rank is not None and limit.who.rank == rank)]
        # It may be the report of any other error, which the same process has told more exactly.
        told = failed.who in victims and (failed.alone or failed.who != lf.Who())
        known = find_known(f"{failed.type}: {failed.message}") if told else None
        if not any(precedes(limit, failed) for limit in limits) and not (known is not None and known.vague):
            roots[_process_key(failed)].name(failed.who).failed.append(failed)
    for exited in state.all[lf.Exited]:
        if _is_own_exit(state, exited):
            roots[_process_key(exited)].name(exited.who).exited.append(exited)
    _attach_bare(roots)
    for trouble in state.all[lf.Trouble]:
        if trouble.fatal:
            _add_trouble(roots, trouble, state)
    found = [root for root in roots.values() if root.facts]
    for root in found:
        if root.is_alone:  # several lines without a traceback: one that is known explains the others
            root.failed.sort(key=lambda failure: find_known(f"{failure.type}: {failure.message}") is None)
    plain = _join_alike([root for root in found if root.is_plain], state)
    plain = [root for root in plain if root.troubles[:1] == [] or root.troubles[0].kind != _NONFINITE] or plain
    times = [root.facts[0].time for root in plain or found]
    clocks = {time.clock for time in times if time is not None}
    timed = len(clocks) == 1 and None not in times

    def place(root: Root) -> tuple[float, ...]:
        """Return the place by time on one clock, else as the launcher says, else by lines of one file.

        Among errors with standalone lines, a known one of a known rank sorts first.
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
    kept = ordered[:1]
    for root in ordered[1:]:  # the first's error again is one bug on several ranks; or one line says two were killed
        ends = [{(end.spot, end.signal) for end in cause.exited if end.signal} for cause in (kept[0], root)]
        if kept[0].failed and root.failed:
            alike = _bug_key(kept[0].failed[0]) == _bug_key(root.failed[0])
        else:
            same = {signal for _, signal in ends[0]} & {signal for _, signal in ends[1]} & _OF_MACHINES
            alike = not kept[0].failed and not root.failed and (bool(same) or not ends[0].isdisjoint(ends[1]))
        if alike:
            kept[0].take(root)
        else:
            kept.append(root)
    return kept


def _join_alike(roots: list[Root], state: RunState) -> list[Root]:
    """Merge the environment faults that every process reports into one fault without a rank or host."""
    merged: dict[tuple[str, ...], Root] = {}
    for root in roots:
        key = tuple(sorted({trouble.kind for trouble in root.troubles if trouble.kind in _ALIKE}))
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


def precedes(fact: lf.Fact, other: lf.Fact) -> bool | None:
    """Return whether one fact is older than the other, or None if that cannot be told."""
    same_clock = fact.time is not None and other.time is not None and fact.time.clock == other.time.clock
    if fact.time is not None and other.time is not None and same_clock and fact.time.seconds != other.time.seconds:
        return fact.time.seconds < other.time.seconds
    if fact.spot.source == other.spot.source and fact.spot.line is not None and other.spot.line is not None:
        return fact.spot.line < other.spot.line
    return None


def _is_own_exit(state: RunState, exited: lf.Exited) -> bool:
    """Return whether a bad end is neither a consequence of another rank's failure nor ordered from outside."""
    if exited.memory:
        return True
    if exited.by_launcher or exited.signal == "SIGTERM" or (exited.signal == "SIGKILL" and state.all[lf.Stopped]):
        return False
    rank = exited.who.rank
    natures = {error.nature for error in state.of(rank, lf.Failed)} if rank is not None else set()
    waits = state.of(rank, lf.Waiting) if rank is not None else []
    follows = bool(natures - {lf.Nature.OWN}) or any(wait.timed_out for wait in waits)
    if exited.signal:
        return exited.signal in FATAL and not (follows and exited.signal in {"SIGABRT", "SIGKILL"})
    return not follows or lf.Nature.OWN in natures


def _process_key(fact: lf.Fact) -> object:
    who = fact.who
    if who.rank is not None:
        return who.rank
    return (who.host or who.address, who.pid, who.local_rank)


def _attach_bare(roots: dict[object, Root]) -> None:
    """Give errors and signals without a rank to the ranks that they ended, if that is plain."""
    bare = [root for root in roots.values() if root.failed and not root.ranks]
    silent = [root for root in roots.values() if root.exited and not root.failed and root.ranks]
    silent = silent or [root for root in roots.values() if root.exited and not root.failed]
    silent = [root for root in silent if all(process.code is not None for process in root.exited)]
    errors = {(failure.type, _DIGITS.sub("", failure.message)) for root in bare for failure in root.failed}
    if len(errors) == 1 and silent:  # ranks that ended with a status and without a word
        first = [root for root in silent if root.is_first]
        several = sum(len(root.failed) for root in bare) > 1
        for root in silent if several or not first else first:
            root.failed.extend(bare[0].failed[:1])
        for root in bare:
            root.failed.clear()
    for root in [root for root in roots.values() if root.exited and not root.ranks and not root.hosts]:
        signals = {process.signal for process in root.exited}
        same = [other for other in roots.values() if other.ranks and any(end.signal in signals for end in other.exited)]
        if len(same) == 1 and signals != {""}:  # both the rank and its launcher tell of it
            same[0].exited.extend(root.exited)
            root.exited.clear()


def _add_trouble(roots: dict[object, Root], trouble: lf.Trouble, state: RunState) -> None:
    """Add a machine fault to the failure that it explains, else as a separate failure."""
    key = _process_key(trouble)
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


def _explains(trouble: lf.Trouble, root: Root, state: RunState) -> bool:
    hosts = root.hosts | {state.hosts[rank] for rank in root.ranks if rank in state.hosts}
    if trouble.who.host and hosts and trouble.who.host not in hosts:
        return False
    if trouble.kind == _KILLED_FOR_MEMORY:
        killed = any(process.signal == "SIGKILL" or process.code == 137 for process in root.exited)
        return killed or any(failure.in_worker for failure in root.failed)
    if trouble.kind in _GPU:
        return any("CUDA" in failure.type or "CUDA" in failure.message for failure in root.failed)
    return trouble.kind == "shm" and any(process.signal == "SIGBUS" for process in root.exited)


def _bug_key(failed: lf.Failed) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """Return what makes two errors the same bug: type, message without numbers, and the innermost user line."""
    message = "".join(char for char in failed.message if not char.isdigit())
    own = [(frame.file, frame.line) for frame in failed.frames if frame.user][-1:]
    return failed.type, message, tuple(own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A process that others have lost."""

    rank: int | None
    host: str  # the name of its host, else its address
    facts: tuple[lf.Fact, ...]  # what the victims say, each one once


def lost_by(state: RunState) -> Lost | None:
    """Return the process that most victims name, or None if there is none or it is a victim."""
    votes: dict[_Name, dict[object, lf.Fact]] = defaultdict(dict)
    complaining = [fact.who for fact in _victims(state)]
    victims: set[_Name] = {("rank", who.rank) for who in complaining}
    victims |= {("host", name) for who in complaining for name in (who.host, who.address)}
    for fact in _victims(state):
        for name in _accused(state, fact):
            if name not in victims:
                who = fact.who
                process = (who.host, who.pid) if who.pid is not None else fact.spot.source
                votes[name].setdefault(who.rank if who.rank is not None else process, fact)
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
    """Return the only rank that was seen and reports no problem, where several others lost a rank."""
    if any(isinstance(fact, lf.Waiting) and fact.timed_out for fact in state.facts):
        return None
    victims = {fact.who.rank: fact for fact in _victims(state) if fact.who.rank is not None}
    ends = {fact.who.rank for fact in state.facts if isinstance(fact, lf.Failed | lf.Exited | lf.Waiting)}
    silent = state.seen - ends
    if len(victims) < 2 or len(silent) != 1:
        return None
    rank = next(iter(silent))
    return Lost(rank=rank, host=state.hosts.get(rank, ""), facts=tuple(victims.values()))


def _victims(state: RunState) -> Iterator[lf.Fact]:
    for fact in state.facts:
        if (
            (isinstance(fact, lf.Failed) and fact.nature in _WAITED)
            or (isinstance(fact, lf.Link) and fact.victim)
            or (isinstance(fact, lf.Waiting) and fact.timed_out)
        ):
            yield fact


def _accused(state: RunState, fact: lf.Fact) -> Iterator[_Name]:
    if isinstance(fact, lf.Failed) and fact.nature is lf.Nature.PEER_LOST:
        yield from (("host", state.host_of(lf.Who(address=host))) for host in fact.peer_hosts)
        yield from (("rank", rank) for rank in fact.peers if not fact.peer_hosts)
    elif isinstance(fact, lf.Link):
        to = fact.to
        rank, place = to.rank, to.local_rank
        if rank is None and place is not None and to.host:  # NCCL numbers the ranks of a host in order
            ranks = sorted(rank for rank, host in state.hosts.items() if host == to.host)
            rank = ranks[place] if place < len(ranks) else None
        if rank is not None:
            yield "rank", rank
        elif (to.host or to.address) and to.local_rank is None:
            yield "host", state.host_of(to)
