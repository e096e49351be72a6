"""ProcessGroupNCCL's watchdog: time limits, how far a rank has come, stacks of collectives. torch 2.0 to 2.15.

The texts are those of ProcessGroupNCCL.cpp of each release, and of nccl2's. "[Rank 2]" in them is a rank in a group:
the one that made the process's first work. "[rank2]:" before them is the global rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ddpdoctor.logs.errors import classify, named_cause, numbers
from ddpdoctor.logs.lines import LineReader, origin_of, quote
from ddpdoctor.logs.stacks import foreign_frame
from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.words import odd_ranks, op_type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from ddpdoctor.logs.lines import Line
    from ddpdoctor.model.stacks import Frame

DEFAULT_GROUP = "default_pg"  # torch's name for the default group
_GROUP = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<name>[^\s(\]]{1,200}?)\s?(?:\((?P<desc>[^)]{0,200})\))? Rank (?P<rank>\d{1,9})\]"
)
# The same for nccl2.
_GROUP2 = re.compile(r"\[TC\](?:\[rank=(?P<rank>-?\d{1,9})\])?(?:\[name=(?P<name>[^\]]{0,200})\])?")
_RANK = re.compile(r"\[Rank (\d{1,9})\]")


class _Said:
    """A line of ProcessGroupNCCL. The rank in the default group is the global rank."""

    def __init__(self, line: Line) -> None:
        self.line, self.text, who = line, line.text, line.who
        match, spoken = _GROUP.search(line.text) or _GROUP2.search(line.text), _RANK.search(line.text)
        place = int(spoken[1]) if spoken is not None else None
        self.key = self.words = ""
        self.is_grouped = match is not None
        if match is not None:
            fields = match.groupdict()
            name, desc = fields["name"] or "", fields.get("desc") or ""
            number = int(fields["rank"] or -1)
            rank = number if 0 <= number < lf.MOST_RANKS else None
            if DEFAULT_GROUP in {desc, name} or (name == "0" and not desc):
                self.words = DEFAULT_GROUP
            else:
                kind = "PG GUID" if "PG GUID" in match[0] else "PG" if name else ""
                self.key, self.words = name, f"{kind} {name} ({desc})" if desc else f"{kind} {name}".strip()
            known = rank if who.rank is None and self.words == DEFAULT_GROUP else who.rank
            self.who = replace(who, rank=known, group=self.key, group_rank=rank)
            place = rank if place is None else place
        else:
            is_rank = who.rank is None and place is not None and place < lf.MOST_RANKS
            self.who = replace(who, group_rank=place) if is_rank else who
        # An identity of the writing process: its global rank, or else its rank in some group
        self.writer: Hashable = who.rank if who.rank is not None else (line.stream, place)
        self.common = origin_of(line, self.who)
        self.group: dict[str, Any] = {"group": self.key, "group_words": self.words}


# A larger number is that of memory that was never set, as torch 2.3 prints it for a group that completed nothing.
MOST_WORKS = 10**9
_DUMP = re.compile(
    r"Received a dump signal due to a collective timeout from .{0,600}?"
    r"Last enqueued NCCL work: (?P<enqueued>-?\d{1,20}).{1,120}?last completed NCCL work: (?P<completed>-?\d{1,20})"
)
_SOURCE = re.compile(r"due to a collective timeout from {1,2}rank (?P<rank>\d{1,9})\b")
_OPTIONS = re.compile(
    r"initialization options: ?size: (?P<size>\d{1,9}), global rank: (?P<rank>\d{1,9})"
    r"(?:.{0,400}?PG Name: (?P<name>[^\s,]{1,200}))?"
)
_NO_GIL = "Could not acquire GIL within"
_STUCK = re.compile(r"watchdog got stuck for (?P<seconds>\d{1,9}) seconds|Heartbeat monitor timed out!")


def _work_numbers(found: re.Match[str]) -> dict[str, Any]:
    """Return the last works enqueued and completed: 0 for none yet (-1), None for memory that was never set."""
    return {name: _work_number(found[name]) for name in ("enqueued", "completed")}


def _work_number(digits: str | None) -> int | None:
    return None if digits is None or abs(int(digits)) > MOST_WORKS else max(int(digits), 0)


def _dump_signal(said: _Said) -> list[lf.Fact]:
    """Read the progress of the default group: the numbers are its own, whichever group timed out."""
    numbers = _DUMP.search(said.text)
    if numbers is None:
        return [lf.Seen(**said.common)]
    common = {**said.common, "who": replace(said.who, group="", group_rank=None)}
    source = _SOURCE.search(said.text)
    told_by = int(source["rank"]) if source is not None else None
    found: list[lf.Fact] = [lf.Reached(group_words=DEFAULT_GROUP, told_by=told_by, **_work_numbers(numbers), **common)]
    if "from this local rank" in said.text:
        found.append(lf.Waiting(operation=lf.Operation(), timed_out=True, **common))
    elif source is not None:
        words = f"rank {source['rank']} timed out in a collective, as other ranks were told"
        found.append(lf.Hint(words=words, kind="told-to-dump", **common))
    return found


def _options(said: _Said) -> list[lf.Fact]:
    """Read which rank starts a group, and how many ranks the group has."""
    options = _OPTIONS.search(said.text)
    if options is None or not int(options["rank"]) < lf.MOST_RANKS or not 0 < int(options["size"]) <= lf.MOST_RANKS:
        return [lf.Seen(**said.common)]
    is_default = options["name"] in {"0", DEFAULT_GROUP} if options["name"] else not said.key
    key = "" if is_default else options["name"] or said.key
    who = replace(said.who, rank=int(options["rank"]), group="", group_rank=None)
    of_group = {**said.common, "who": replace(who, rank=None)}
    return [lf.Seen(**{**said.common, "who": who}), lf.Size(ranks=int(options["size"]), group=key, **of_group)]


def _stuck(said: _Said) -> list[lf.Fact]:
    if _NO_GIL in said.text:
        return [lf.Hint(words="a thread held the GIL when torch wanted to end the process", kind="gil", **said.common)]
    stuck = _STUCK.search(said.text)
    if stuck is None:
        return []
    long = f" for {stuck['seconds']} s" if stuck["seconds"] else ""
    words = f"torch's watchdog thread was stuck{long}: a CUDA or NCCL call does not return, or the GIL is held"
    return [lf.Hint(words=words, kind="watchdog-stuck", **said.common)]


def _store_gone(said: _Said) -> list[lf.Fact]:
    problem = "the job's store stopped answering: the process that serves it, rank 0 or its agent, had ended"
    fix = "first find out what ended rank 0 and its launcher"
    return [lf.Link(to=lf.Who(rank=0), problem=problem, fix=fix, victim=True, **said.common)]


def _failure(said: _Said, error: str | None = None) -> list[lf.Failed]:
    error = said.text if error is None else error
    kind = next((kind for kind in ("CUDA error", "HIP error") if kind in error), "NCCL error")
    return [lf.Failed(type=kind, message=quote(error), **classify("", error).fields, **said.common)]


_NOTES: dict[str, Callable[[_Said], Sequence[lf.Fact]]] = {
    "initialization options:": _options,
    "Received a dump signal": _dump_signal,
    "watchdog got stuck for": _stuck,
    "Heartbeat monitor timed out!": _stuck,
    _NO_GIL: _stuck,
    'Failed to check the "should dump" flag on TCPStore': _store_gone,
    'TCPStore check for dump key "': _store_gone,
    "Found key in store: NCCLABORTEDCOMM": _failure,  # what torch before 2.2 says of another rank
    "Observed flight recorder dump signal": lambda said: [lf.Seen(**said.common)],
}

# The desync report of ProcessGroupNCCL (TORCH_NCCL_DESYNC_DEBUG, or TORCH_DISTRIBUTED_DEBUG=DETAIL). Group ranks

_RANKS = r"\[(?P<ranks>\d[\d, ]{0,100000})\]"
_BEGINS = re.compile(r"- \[(?P<rank>\d{1,9})\] Timeout at collective: (?P<op>\w{1,60}), #(?P<seq>\d{1,12})")
_NEVER = re.compile(rf"ranks {_RANKS} are the lagging ranks that caused this timeout")
_INSIDE = re.compile(rf"{_RANKS} joined but didn't finish collective #(?P<seq>\d{{1,12}})")
_BEHIND = re.compile(
    rf"{_RANKS} finished collective #(?P<done>\d{{1,12}}), but didn't join collective #(?P<seq>\d{{1,12}})"
)
_NUMBER = re.compile(r"^\s*#(?P<seq>\d{1,12}) (?P<state>started|finished) ranks:")
_STATE = re.compile(rf"^\s*{_RANKS} (?P<state>started|finished) (?P<op>\w{{1,60}})")
_NEAR = 4  # a report belongs to a head with a group if it starts within this many lines
_MOST_REPORTS = 64
_LONGEST = 2000  # our choice: no report has this many lines, including lines of other processes in between


@dataclass(slots=True)
class _Report:
    rank: int
    operation: lf.Operation
    line: Line
    seq: int = 0  # the number of the snapshot's part that is being read
    # The ranks inside an operation, by its number and name.
    started: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class _DesyncReports:
    open: dict[Hashable, _Report] = field(default_factory=dict)
    # The line of the last head with a group, and that group: a report begins in the next line.
    group: tuple[int, dict[str, Any]] = (-_NEAR, {})

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        if "Timeout at collective: " in text and (begins := _BEGINS.search(text)) is not None:
            group = self.group[1] if line.number - self.group[0] <= _NEAR else {}
            operation = lf.Operation(op=op_type_name(begins["op"]), seq=int(begins["seq"]), **group)
            found = self._close(line.stream)
            if len(self.open) < _MOST_REPORTS:
                self.open[line.stream] = _Report(int(begins["rank"]), operation, line)
            return found
        report = self.open.get(line.stream)
        if report is None:
            return ()
        own = report.operation
        if (never := _NEVER.search(text)) is not None:
            return _absent(line, report, never["ranks"], own)
        if (behind := _BEHIND.search(text)) is not None:
            seq = int(behind["seq"])  # only the operation in the report is known by name
            at = own if own.seq == seq else lf.Operation(seq=seq, group=own.group, group_words=own.group_words)
            return _absent(line, report, behind["ranks"], at)
        if (inside := _INSIDE.search(text)) is not None:
            # Ranks inside the lowest number are suspects only if another has passed it.
            is_passed = own.seq is not None and int(inside["seq"]) < own.seq
            return _absent(line, report, inside["ranks"], own, certain=False) if is_passed else ()
        if (number := _NUMBER.search(text)) is not None:
            report.seq = int(number["seq"]) if number["state"] == "started" else 0
        elif (state := _STATE.search(text)) is not None:
            if report.seq and state["state"] == "started":
                report.started.setdefault(report.seq, {})[state["op"]] = numbers(state["ranks"])
        elif line.number - report.line.number > _LONGEST:
            return self._close(line.stream)
        return ()

    def end(self) -> Iterable[lf.Fact]:
        return [fact for stream in list(self.open) for fact in self._close(stream)]

    def _close(self, stream: Hashable) -> list[lf.Fact]:
        """Return the calls in which the ranks of a snapshot differ."""
        report = self.open.pop(stream, None)
        if report is None:
            return []
        own, line = report.operation, report.line
        found: list[lf.Fact] = []
        for seq, sides in report.started.items():
            ordered = sorted(sides.items(), key=lambda side: -len(side[1]))
            if len(ordered) > 1:
                found.append(lf.Differ(
                    spot=line.spot(), time=line.time, said=quote(line.text), aspect="operation", settled=True,
                    sides=tuple((ranks, replace(own, op=op_type_name(op), seq=seq)) for op, ranks in ordered),
                    odd=odd_ranks([ranks for _, ranks in ordered]),
                ))  # fmt: skip
        return found


def _absent(line: Line, report: _Report, ranks: str, operation: lf.Operation, *, certain: bool = True) -> list[lf.Fact]:
    own = report.operation
    waiters = (report.rank,) if not own.group else ()
    common: dict[str, Any] = {"spot": line.spot(), "time": line.time, "said": quote(line.text)}
    return [
        lf.Absent(
            who=lf.Who(rank=rank) if not own.group else lf.Who(group=own.group, group_rank=rank),
            operation=operation, waiters=waiters, certain=certain, expected=True, shown=lf.Shown.WORDS, **common,
        )
        for rank in numbers(ranks)
    ]  # fmt: skip


_MOST_OPEN = 20_000
_MOST_FRAMES = 200
_MOST_TRACES = 64
_TAIL_LINES = 8
_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d{1,20}), )?(?:OpType=(?P<op>\w{1,60})(?=[,)])|(?<=, )OpT?y?p?e?=?\w{0,60}$)"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]{0,200})\])?"
    r"(?:, NumelIn=(?P<numel_in>\d{1,20}), NumelOut=(?P<numel_out>\d{1,20})(?=[,)]))?"
    r"(?:, Timeout\(ms\)=(?P<limit>\d{1,20}))?"
)
_STATUS = re.compile(
    r"(?:detected by watchdog at work(?: sequence id)?|Timeout at NCCL work): (?P<seq>\d{1,20})"
    r".{1,40}?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,20})"
    r".{1,120}?last completed (?:NCCL )?work: (?P<completed>-?\d{1,20})"
)
_RAN = re.compile(r" ran for (?P<ran>\d{1,15}) milliseconds before timing out")
_FRAME = re.compile(r"^\s*#(?P<number>\d{1,4}) (?P<function>.{1,200}?) from (?P<file>.{1,1000}):(?P<line>\d{1,8})\s*$")
_DIED = re.compile(r"atchdog thread terminated with exception: (?P<error>.*)")
_ABORTED = re.compile(r"Aborting process on rank (?P<rank>\d{1,9}) due to (?P<error>.*)")
# What people write where they leave out lines.
_ELIDED = re.compile(
    r"\W*(?:\.{3,}|…|\. \. \.)\W*|\W*(?:\d{1,9} )?(?:more )?(?:lines? |logs? |output )?"
    r"(?:snip(?:ped)?|truncated|omitted|elided|skipped|cut(?: off)?)\W*|\W{2,}\d{0,9} ?(?:more )?lines\W{2,}",
    re.IGNORECASE,
)
_LONGEST_MARK = 60
_C10D = "torch/distributed/distributed_c10d.py"
_TIMED_OUT = ("Watchdog caught collective operation timeout", "timed out in blocking wait")


@dataclass(slots=True)
class _Wait:
    fact: lf.Waiting
    grouped: bool
    frames: list[Frame] = field(default_factory=list)

    @property
    def is_bare(self) -> bool:
        """Only the number of the operation is known."""
        return not self.fact.operation.op and self.fact.operation.seq is not None

    def join(self, said: _Said) -> None:
        operation = replace(self.fact.operation, **said.group)
        who = replace(self.fact.who, rank=said.who.rank, group=said.key, group_rank=said.who.group_rank)
        self.fact, self.grouped = replace(self.fact, who=who, operation=operation), True

    def done(self) -> lf.Waiting:
        if not self.frames:
            return self.fact
        operation = self.fact.operation
        if any(frame.function == "barrier" and frame.file.endswith(_C10D) for frame in self.frames):
            operation = replace(operation, made_by="barrier")
        return replace(self.fact, frames=tuple(reversed(self.frames)), operation=operation)


@dataclass(slots=True)
class _Tail:
    """A watchdog error, with details in the lines after it."""

    fact: lf.Failed
    common: dict[str, Any]
    left: int = _TAIL_LINES
    words: bool = False  # whether the next line has NCCL's message


@dataclass(slots=True, eq=False)
class WatchdogReader(LineReader):
    """Finds messages of ProcessGroupNCCL about collectives that do not end."""

    name = "NCCL watchdog"
    triggers = (b"NCCL", b"imeout")
    _open: dict[Hashable, list[_Wait]] = field(default_factory=dict)
    _count: int = 0
    # The stacks that are being read, innermost frame first, by their streams: their lines have no prefix.
    _traces: list[tuple[Hashable, _Wait]] = field(default_factory=list)
    _tail: _Tail | None = None
    _said: set[Hashable] = field(default_factory=set)
    _desync: _DesyncReports = field(default_factory=_DesyncReports)

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        found: list[lf.Fact] = []
        if len(text) < _LONGEST_MARK and _ELIDED.fullmatch(text):
            return [lf.Hint(spot=line.spot(), words="lines are missing from the middle of the log", kind="elided")]
        if self._traces and "#" in text and self._read_frame(line):
            return ()
        if self._tail is not None:
            found += self._read_tail(self._tail, line.text.strip())
        if line.begins_run and (self._open or self._said or self._desync.open):
            return [*found, *self.end()]
        found += self._desync.read(line)
        if ("NCCL" in text or "atchdog" in text or "[TC]" in text) and " NCCL INFO " not in text:
            found += self._read_own(_Said(line))
        return found

    def end(self) -> Iterable[lf.Fact]:
        found: list[lf.Fact] = [self._tail.fact] if self._tail is not None else []
        found += [wait.done() for waits in self._open.values() for wait in waits]
        found += self._desync.end()
        self._open.clear()
        self._traces.clear()
        self._said.clear()
        self._count = 0
        self._tail = None
        return found

    def _read_own(self, said: _Said) -> Sequence[lf.Fact]:
        text, writer = said.text, said.writer
        if said.is_grouped:
            self._desync.group = (said.line.number, said.group)
        # The watchdog ends its process here: the last line that a rank writes
        last = lf.Hint(words="", kind="watchdog-ended", **said.common)
        if any(words in text for words in _TIMED_OUT):
            is_last = "terminated with exception" in text or "Aborting process" in text
            return [*self._read_timeout(said), *([last] if is_last else [])]
        if (status := _STATUS.search(text)) is not None:
            waits = self._open.get(writer, [])
            seq = _work_number(status["seq"])
            wait = next((wait for wait in waits if wait.fact.operation.seq == seq and not wait.grouped), None)
            if wait is not None and said.is_grouped:
                wait.join(said)
            elif said.is_grouped and said.line.who.rank is not None and self._is_new(writer, seq):
                # The line of the limit itself is lacking
                limit = lf.Waiting(operation=lf.Operation(seq=seq, **said.group), timed_out=True, **said.common)
                self._keep(writer, _Wait(fact=limit, grouped=True))
            numbers = _work_numbers(status)
            if not self._is_new(writer, said.key, said.words, *numbers.values()):
                return []
            return [lf.Reached(**numbers, **said.group, **said.common)]
        if (aborted := _ABORTED.search(text)) is not None:  # nccl2 ends a process: a time limit, or an error
            if "timeout" not in aborted["error"]:
                return _failure(said, aborted["error"])
            is_new = self._is_new_call(writer, lf.Operation())
            limit = lf.Waiting(operation=lf.Operation(**said.group), timed_out=True, **said.common)
            return [limit, last] if is_new else [last]
        if "Stack trace of the failed collective" in text:
            if "not found" in text:
                return self._close(writer, grouped_only=True)
            # A line without any rank may continue the wait that was opened last in its stream.
            same = (who for who in reversed(self._open) if isinstance(who, tuple) and who[0] == said.line.stream)
            waits = self._open.get(writer) or self._open.get(next(same, None), [])
            wait = next((wait for wait in reversed(waits) if not wait.frames), None)
            if wait is not None:
                self._traces = [*self._traces[-_MOST_TRACES:], (said.line.stream, wait)]
                return []
        found: list[lf.Fact] = []
        if "taking the entire process down" in text:
            found = self._close(writer, grouped_only=True)
        elif (died := _DIED.search(text)) is not None:  # an error that the watchdog found
            found = self._close(writer, grouped_only=True)
            if died["error"].strip() and self._is_new(writer, died["error"]):
                self._tail = _Tail(_failure(said, died["error"])[0], said.common)
        return found or next((read(said) for words, read in _NOTES.items() if words in text), ())

    # time limits

    def _read_timeout(self, said: _Said) -> list[lf.Fact]:
        """Read a limit. Each error repeats the text of the previous one."""
        text, writer = said.text, said.writer
        work = _WORK.search(text)
        if work is None and "NCCL operation timed out" not in text:
            return []  # cut off
        operation, limit_s = _operation(work)
        is_last = "terminated with exception" in text
        waits = self._open.get(writer, [])
        key = attrgetter("seq", "op", "numel_in", "numel_out")
        same = next((wait for wait in waits if key(wait.fact.operation) == key(operation)), None)
        bare = next((wait for wait in waits if wait.fact.operation.seq == operation.seq and wait.is_bare), None)
        if bare is not None:
            known = bare.fact.operation
            operation = replace(operation, group=known.group, group_words=known.group_words)
            bare.fact = replace(bare.fact, operation=operation, limit_s=limit_s)
            return self._close(writer, only=bare) if is_last else []
        if same is not None:
            if not said.is_grouped or same.grouped:
                return []
            same.join(said)
            return self._close(writer, only=same)
        if not self._is_new_call(writer, operation):
            return []
        self._said.add((writer, operation.seq))
        ran = _RAN.search(text)
        ran_s = int(ran["ran"]) / 1000 if ran is not None else None
        fact = lf.Waiting(operation=operation, timed_out=True, limit_s=limit_s, ran_s=ran_s, **said.common)
        wait = _Wait(fact=fact, grouped=said.is_grouped)
        if said.is_grouped:
            wait.join(said)
        if work is None or is_last:
            return [wait.fact]
        self._keep(writer, wait)
        return list(self.end()) if self._count > _MOST_OPEN else []

    def _keep(self, writer: Hashable, wait: _Wait) -> None:
        self._open.setdefault(writer, []).append(wait)
        self._count += 1

    def _is_new(self, *said: Hashable) -> bool:
        """Note a writer's message; return whether it is the first time."""
        is_new = said not in self._said
        self._said.add(said)
        return is_new

    def _is_new_call(self, writer: Hashable, operation: lf.Operation) -> bool:
        is_new = (key := (writer, operation.seq, operation.op, operation.numel_in)) not in self._said
        if len(self._said) > 10 * _MOST_OPEN:
            self._said.clear()
        self._said.add(key)
        return is_new

    def _close(self, writer: Hashable, *, only: _Wait | None = None, grouped_only: bool = False) -> list[lf.Fact]:
        """Return the waits of a rank that are complete."""
        waits = self._open.get(writer, [])
        full = [wait for wait in waits if wait.grouped and not wait.is_bare] if grouped_only else waits
        done = [wait for wait in full if only is None or wait is only]
        left = [wait for wait in waits if not any(wait is other for other in done)]
        if left:
            self._open[writer] = left
        else:
            self._open.pop(writer, None)
        self._count -= len(done)
        self._traces = [trace for trace in self._traces if not any(trace[1] is wait for wait in done)]
        return [wait.done() for wait in done]

    # stacks

    def _read_frame(self, line: Line) -> bool:
        match = _FRAME.match(line.text)
        if match is None:
            return False
        number = int(match["number"])
        fitting = [(stream, wait) for stream, wait in self._traces if len(wait.frames) == number]
        own = [wait for stream, wait in fitting if stream == line.stream]
        wait = next(reversed(own or [wait for _, wait in fitting]), None)
        if wait is not None and number < _MOST_FRAMES:
            wait.frames.append(foreign_frame(match["file"], int(match["line"]), match["function"]))
        return True

    def _read_tail(self, tail: _Tail, text: str) -> list[lf.Fact]:
        """Read on: NCCL's own words follow "Last error:"."""
        tail.left -= 1
        ends = text.startswith(("[", "frame #", "Exception raised from", "Traceback")) or not tail.left
        if ends:
            self._tail = None
            return [tail.fact]
        if tail.words and (cause := named_cause(text, tail.common)) is not None:
            self._tail = None
            return [cause, replace(tail.fact, nature=lf.Nature.FOLLOWS, peers=(), peer_hosts=())]
        tail.words = text.startswith("Last error:")
        if "NCCL" in tail.fact.type and text and "CUDA kernel" not in text:
            message = f"{tail.fact.message} {text}"
            tail.fact = replace(tail.fact, message=quote(message), **classify("", message).fields)
        return []


def _operation(work: re.Match[str] | None) -> tuple[lf.Operation, float | None]:
    """Return the operation of a "WorkNCCL(…)", and its time limit in seconds."""
    if work is None:
        return lf.Operation(), None
    shape = tuple(map(int, re.findall(r"\d+", work["shape"]))) if work["shape"] is not None else None
    operation = lf.Operation(
        op=op_type_name(work["op"] or ""), seq=_work_number(work["seq"]), shape=shape,
        numel_in=int(work["numel_in"]) if work["numel_in"] else None,
        numel_out=int(work["numel_out"]) if work["numel_out"] else None,
    )  # fmt: skip
    return operation, int(work["limit"]) / 1000 if work["limit"] else None
