"""Reads all evidence in one pass with bounded memory, and sorts the facts by runs of the job."""

from __future__ import annotations

import os
import re
import sys
from calendar import timegm
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from time import gmtime
from typing import TYPE_CHECKING

from ddpdoctor.logs.files import HEAD_BYTES, MOST_BYTES, MOST_UNPACKED, find_files, is_text, open_file
from ddpdoctor.logs.lines import Document, Funnel, LineReader, LogSplitter
from ddpdoctor.logs.nccl_log import WANTED_INFO, NcclLogReader
from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.attached import AskedNodes, AttachedJob
from ddpdoctor.model.words import count_of, first_names, grouped, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.logs.files import FileContent, LogFile
    from ddpdoctor.logs.lines import DocumentFormat
    from ddpdoctor.model.attached import JobIdentity


@cache
def document_formats() -> tuple[DocumentFormat, ...]:
    """Return the formats of whole files. A file has the first that recognizes it."""
    from ddpdoctor.logs.flight import FLIGHT_JSON, FLIGHT_PICKLE
    from ddpdoctor.logs.launchers import ERROR_FILE
    from ddpdoctor.logs.machines import MACHINE_FACTS, NVIDIA_SMI
    from ddpdoctor.logs.ras import RAS_JSON
    from ddpdoctor.logs.stacks import ATTACH, JSON_STACKS, STACKS

    return (
        FLIGHT_PICKLE, ATTACH, MACHINE_FACTS, FLIGHT_JSON, RAS_JSON, NVIDIA_SMI, JSON_STACKS, STACKS, ERROR_FILE,
    )  # fmt: skip


def line_readers() -> tuple[LineReader, ...]:
    """Return new readers for one stream of lines, all of which get all lines.

    The reader of launches is the last: what the others held back until a launch belongs before it.
    """
    from ddpdoctor.logs.errors import CollectiveErrorReader, CrashReader
    from ddpdoctor.logs.launchers import (
        FrameworkReader,
        HorovodReader,
        LaunchReader,
        SacctReader,
        SlurmReader,
        TorchrunReader,
    )
    from ddpdoctor.logs.machines import KernelReader, KubernetesReader, NcclTestsReader
    from ddpdoctor.logs.ras import RasReader
    from ddpdoctor.logs.stacks import FaulthandlerReader
    from ddpdoctor.logs.tracebacks import TracebackReader
    from ddpdoctor.logs.watchdog import WatchdogReader

    return (
        WatchdogReader(), CollectiveErrorReader(), TracebackReader(), CrashReader(), FaulthandlerReader(),
        NcclLogReader(), RasReader(), KernelReader(), KubernetesReader(), NcclTestsReader(), TorchrunReader(),
        SlurmReader(), SacctReader(), FrameworkReader(), HorovodReader(), LaunchReader(),
    )  # fmt: skip


def _start_of(job: AttachedJob) -> tuple[JobIdentity, int]:
    """Return what is equal on all nodes of one start of a job. A node may have several jobs of one name."""
    return replace(job.job, name=""), max((rank.restart_count or 0 for rank in job.ranks), default=0)


def leave_out_folders(records: Mapping[str, AttachedJob | AskedNodes], sources: Iterable[str]) -> dict[str, str]:
    """Return by file name why a whole folder is left out: it is from another job or older."""
    if not records:
        return {}
    above = {source: source[: source.rfind("/") + 1] for source in records}  # empty for the current folder
    folders = {above[source]: job for source, job in records.items() if isinstance(job, AttachedJob)}
    ranks = {path: {rank.rank for rank in job.ranks if rank.rank is not None} for path, job in folders.items()}
    reasons: dict[str, str] = {}
    # Folders of jobs other than the one that attach read last
    by_start = grouped((_start_of(job), path) for path, job in folders.items())
    last = max(by_start.values(), key=lambda paths: max(folders[path].wall_ns for path in paths), default=[])
    for path, job in folders.items():
        if path in last:
            continue
        newest = folders[last[0]]
        of = f", of {job.world_size} ranks" if job.world_size is not None else ""
        reasons[path] = (
            "left out: from an earlier start of the job"
            if _start_of(job)[0] == _start_of(newest)[0]
            else f"left out: from another job, {job.job.name}{of}; the one examined last is {newest.job.name}"
        )
    # Folders of ranks that attach read again later
    newest_first = sorted(last, key=lambda path: folders[path].wall_ns, reverse=True)
    for place, path in enumerate(newest_first):
        again = next((later for later in newest_first[:place] if ranks[later] & ranks[path]), None)
        if again is not None:
            age = count_of(round((folders[again].wall_ns - folders[path].wall_ns) / 60e9), "minute")
            reasons[path] = f"left out: {rank_list(ranks[again] & ranks[path])} were looked at again {age} later"
    for source in (source for source, record in records.items() if isinstance(record, AskedNodes)):
        inside = [path for path in folders if path.startswith(above[source])]
        if inside and all(path in reasons for path in inside):
            reasons[above[source]] = reasons[inside[0]]
    return {source: why for source in sources for path, why in reasons.items() if path and source.startswith(path)}


# Our choice: twice the longest time limit that torch sets by itself. Ranks of a job that hangs stop within it.
LONG_AGO_S = 3600


def choose_dumps(dumps: Sequence[lf.FlightDump]) -> tuple[list[lf.FlightDump], dict[str, str]]:
    """Return the dumps of the newest job, and for each other file the reason why it is left out."""
    left_out: dict[str, str] = {}
    # Those without calls, and those whose last calls are about as recent as the others'
    dated = sorted((dump for dump in dumps if dump.last_ns), key=_last_ns, reverse=True)
    recent = dated[:1]
    for dump in dated[1:]:
        if _last_ns(recent[-1]) - _last_ns(dump) > LONG_AGO_S * 1e9:
            older_s = (_last_ns(dated[0]) - _last_ns(dump)) / 1e9
            age = f"{older_s / 86400:.0f} days" if older_s > 3 * 86400 else f"{older_s / 3600:.0f} h"
            left_out[dump.spot.source] = f"left out: its last call is {age} older than those of the others"
        else:
            recent.append(dump)
    recent += [dump for dump in dumps if not dump.last_ns]
    # Of these, those with the most common world size
    sizes = grouped((dump.world_size, dump) for dump in recent if dump.world_size)
    most = max(sizes, key=lambda size: (len(sizes[size]), max(map(_last_ns, sizes[size]))), default=None)
    for size, others in sizes.items():
        for dump in others if size != most else ():
            left_out[dump.spot.source] = f"left out: from a job of {size} ranks, but the others are from one of {most}"
    kept: list[lf.FlightDump] = []
    for rank, those in grouped((dump.rank, dump) for dump in recent if dump.spot.source not in left_out).items():
        newest = max(those, key=lambda dump: (_last_ns(dump), dump.has_frames))
        kept += those if rank is None else [newest]
        for dump in those if rank is not None else ():
            # `attach` saved a rank's dumps of its two looks in files whose names differ only in the look.
            sources = {candidate.spot.source.replace("look_2/", "look_1/") for candidate in (dump, newest)}
            if dump is not newest and len(sources) > 1:
                left_out[dump.spot.source] = f"left out: another dump of rank {rank}; {newest.spot.source} is newer"
    return kept, left_out


def _last_ns(dump: lf.FlightDump) -> int:
    return dump.last_ns or 0


_ENDS = (lf.Failed, lf.Exited, lf.Stopped, lf.Finished)
# Facts of which a job is made. Others may tell of machines, before and after it.
_OF_RANKS = (*_ENDS, lf.Launched, lf.Restarted, lf.Waiting, lf.Reached, lf.Moving)
_SLURM = re.compile(r"slurm-(\d+)")
# Our choice: what is further apart in time is of two jobs. Clocks of one job may be in different time zones.
_DAY_S = 86_400
_HOUR_S = 3600
_YEAR_S = 365 * _DAY_S
_DATED_S = 10**9  # times below it have no date, or no year


@dataclass(slots=True, kw_only=True)
class Part:
    """The facts of one file, in their order there."""

    source: str
    attempt: int | None
    modified: float | None
    facts: list[lf.Fact] = field(default_factory=list)
    dumps: list[lf.FlightDump] = field(default_factory=list)
    attached: AttachedJob | AskedNodes | None = None
    # The first and the last time in its lines, in seconds since the epoch, if they have dates.
    span: tuple[float, float] | None = None
    # What its lines call the job: ("SLURM_JOB_ID", "4711"), ("MASTER_PORT", "29511").
    names: frozenset[tuple[str, str]] = frozenset()


@dataclass(slots=True)
class _Job:
    """The files of one job, and what they have in common."""

    number: int = 0  # that of Slurm in the names of its files, or 0
    parts: list[Part] = field(default_factory=list)
    names: dict[str, set[str]] = field(default_factory=dict)
    worlds: set[int] = field(default_factory=set)
    span: tuple[float, float] | None = None
    modified: float = 0

    def add(self, part: Part) -> None:
        self.parts.append(part)
        for kind, name in part.names:
            self.names.setdefault(kind, set()).add(name)
        self.worlds |= {world} if (world := _world(part)) is not None else set()
        self.modified = max(self.modified, part.modified or 0)
        span = _span(part)
        if span is not None and (self.span is None or span[0] > _DATED_S > self.span[0]):
            self.span = span
        elif span is not None and self.span is not None and (span[0] > _DATED_S) == (self.span[0] > _DATED_S):
            self.span = (min(span[0], self.span[0]), max(span[1], self.span[1]))

    @property
    def newness(self) -> tuple[float, float]:
        """What is greater for a later job: its end, or when its files were last written."""
        return (self.span[1] if self.span is not None else 0, self.modified)

    def contradicts(self, part: Part) -> bool:
        """Return whether a file is of another job: it has another name, or is from another time."""
        for kind, mine in self.names.items():
            names = {name for category, name in part.names if category == kind}
            if len(mine) == len(names) == 1 and mine != names:
                return True
        span = _span(part)
        gap_s = _gap(self.span, span) if self.span is not None and span is not None else 0
        is_other_world = bool(self.worlds) and _world(part) not in {None, *self.worlds}
        return gap_s > _DAY_S or (gap_s > _HOUR_S and is_other_world)


def gather_runs(parts: Sequence[Part]) -> tuple[tuple[lf.LoggedRun, ...], dict[str, str]]:
    """Return the runs, the last one last, and why whole files were left out of all runs.

    They are counted from the ends of files: a file with one run belongs to the last run.
    """
    folders = {part.source: part.attached for part in parts if part.attached is not None}
    left_out = leave_out_folders(folders, [part.source for part in parts]) if folders else {}
    parts = [part for part in parts if part.source not in left_out]
    last_attempt = max((part.attempt or 0 for part in parts), default=0)
    jobs = _jobs(parts)
    runs: list[lf.LoggedRun] = []
    for job in jobs:
        by_attempt = grouped((last_attempt if part.attempt is None else part.attempt, part) for part in job.parts)
        for attempt, those in sorted(by_attempt.items()):
            pieces = [_split(part.facts) for part in those]
            for back in range(max(map(len, pieces)), 0, -1):
                facts = [fact for piece in pieces if len(piece) >= back for fact in piece[-back]]
                dumps = [dump for part in those for dump in part.dumps if back == 1]
                if dumps:
                    dumps, others = choose_dumps(dumps)
                    left_out |= others
                name = _name(job, attempt, facts, of_jobs=len(jobs), last_attempt=last_attempt)
                runs.append(lf.LoggedRun(facts=tuple(facts), dumps=tuple(dumps), number=len(runs), name=name))
    return tuple(runs), left_out


def _jobs(parts: Sequence[Part]) -> list[_Job]:
    """Return the jobs of these files, the last one last. Files without a job are added to the last one."""
    jobs: dict[int, _Job] = {}
    others: list[Part] = []
    for part in parts:
        found = _SLURM.search(part.source.rpartition("/")[2])
        if found is None:
            others.append(part)
        else:
            number = int(found[1][:15])
            jobs.setdefault(number, _Job(number)).add(part)
    told = list(jobs.values())
    rest: list[Part] = []
    for part in sorted(others, key=lambda part: (_span(part) or (0, 0))[::-1]):
        is_of_ranks = not part.dumps and any(isinstance(fact, _OF_RANKS) for fact in part.facts)
        if not is_of_ranks or (_span(part) is None and not part.names):
            rest.append(part)
            continue
        fitting = [job for job in told if not job.contradicts(part)]
        if not fitting:
            told.append(_Job())
        max(fitting or told[-1:], key=lambda job: (job.number, *job.newness)).add(part)
    are_numbered = all(job.number for job in told)
    told.sort(key=lambda job: (job.number,) if are_numbered else job.newness)
    told = told or [_Job()]
    for part in rest:
        told[-1].add(part)
    places = {part.source: place for place, part in enumerate(parts)}
    for job in told:
        job.parts.sort(key=lambda part: places[part.source])
    return told if parts else []


def _span(part: Part) -> tuple[float, float] | None:
    """Return the first and the last time in a file. Those of torch's own log have no year."""
    if part.span is not None or part.dumps or part.attached is not None:
        return part.span
    times = [fact.time.seconds for fact in part.facts if fact.time is not None and fact.time.clock.endswith("no year")]
    return (min(times), max(times)) if times else None


def _gap(span: tuple[float, float], other: tuple[float, float]) -> float:
    """Return how many seconds lie between two spans. If one has no year, the years do not count."""
    if (span[0] > _DATED_S) == (other[0] > _DATED_S):
        gap_s = max(span[0] - other[1], other[0] - span[1], 0)
        return gap_s if span[0] > _DATED_S else min(gap_s, max(_YEAR_S - gap_s, 0))
    dated, plain = (span, other) if span[0] > _DATED_S else (other, span)
    begin = gmtime(dated[0])
    first = timegm((1970, begin.tm_mon, begin.tm_mday, begin.tm_hour, begin.tm_min, begin.tm_sec, 0, 0, 0))
    gap_s = max(first - plain[1], plain[0] - (first + dated[1] - dated[0]), 0)
    return min(gap_s, max(_YEAR_S - gap_s, 0))


def _world(part: Part) -> int | None:
    return max((fact.ranks for fact in part.facts if isinstance(fact, lf.Size) and not fact.group), default=None)


def _split(facts: Sequence[lf.Fact]) -> list[list[lf.Fact]]:
    pieces: list[list[lf.Fact]] = [[]]
    ended = False
    last: lf.Time | None = None
    for fact in facts:
        at = fact.time
        is_later = last is not None and at is not None and at.clock == last.clock and at.seconds - last.seconds > _DAY_S
        if isinstance(fact, lf.Restarted) or (ended and (isinstance(fact, lf.Launched) or is_later)):
            pieces.append([])
            ended = False
        pieces[-1].append(fact)
        last = fact.time or last
        ended = ended or isinstance(fact, _ENDS) or (isinstance(fact, lf.Waiting) and fact.timed_out)
    return pieces


def _name(job: _Job, attempt: int, facts: Sequence[lf.Fact], *, of_jobs: int, last_attempt: int) -> str:
    words = []
    if of_jobs > 1:
        sources = [part.source for part in job.parts]
        words.append(f"job {job.number}" if job.number else f"the job of {first_names(sources, 2)}")
    words += [f"attempt {attempt}"] if last_attempt else []
    begins = next((fact.spot for fact in facts if fact.spot.line is not None), None)
    words += [f"from {begins.source}:{begins.line}"] if begins is not None and not words else []
    return ", ".join(words)


BLOCK_BYTES = 64 * 2**10  # A log is searched for triggers in blocks of this size. A block without any is only counted.
MANY_FILES = 64  # our choice: with fewer files, starting processes takes longer than they save
MOST_PROCESSES = 32
MOST_ALIKE = 16  # our choice: so many facts of one kind about one process that differ in numbers only are kept
_MOST_NAMES = 64
# How a job calls itself in its log. "run_id" is torchrun's, in a column: trackers write one for each rank.
_JOB_NAMES = re.compile(
    r"\b(SLURM_JOB_?ID|PBS_JOBID|LSB_JOBID|MASTER_PORT|master[_-]port|rdzv[_-]id|run_id(?= {5}))\b"
    r"[\"']?\s{0,20}[=: ]\s{0,20}[\"']?([\w.-]{1,80})"
)
_SAME_NAME = {"SLURM_JOBID": "SLURM_JOB_ID", "RDZV_ID": "RUN_ID"}
_DIGITS = re.compile(r"\d+")


def _likeness(fact: lf.Fact) -> tuple[object, ...]:
    """Return the key that facts share if they differ only in numbers."""
    return (type(fact), fact.who, _DIGITS.sub("", fact.said))


def read_logs(paths: Sequence[str]) -> lf.Logs:
    """Read logs, dumps and stacks. "-" is standard input. Raises UserError if a path does not exist."""
    pairs = list(_read_files(list(find_files(paths))))
    parts, read = [part for part, _ in pairs if part is not None], [what for _, what in pairs]
    counts = {"files": len(read), "lines": sum(file.lines for file in read), "bytes": sum(file.bytes for file in read)}
    runs, left_out = gather_runs(parts)
    read = [replace(file, left_out=left_out[file.source]) if file.source in left_out else file for file in read]
    seen = (part.attached for part in parts if part.source not in left_out)
    attached = tuple(job for job in seen if isinstance(job, AttachedJob))
    return lf.Logs(runs=runs, read=tuple(read), attached=attached, counts=counts)


def _read_files(files: Sequence[LogFile]) -> Iterator[tuple[Part | None, lf.Read]]:
    """Read the files in order, on all cores if there are many."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if len(files) < MANY_FILES or cores == 1 or any(file.path is None for file in files):
        yield from map(_read_file, files)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(min(cores, MOST_PROCESSES), get_context("fork")) as pool:
        yield from pool.map(_read_file, files, chunksize=8)


def _read_file(file: LogFile) -> tuple[Part | None, lf.Read]:
    """Read one file. A failure loses only this file, and the others are read."""
    if file.problem:
        return None, lf.Read(source=file.name, formats=(), problem=file.problem)
    try:
        stream, head, modified = open_file(file)
        with stream:
            part = Part(source=file.name, attempt=file.attempt, modified=modified)
            reader = next((reader for reader in document_formats() if reader.recognizes(head)), None)
            if reader is not None:
                return _read_document(reader, file, stream, head, part)
            if head and is_text(head):
                return _read_log(file, stream, head, part)
            stream.look_for_damage()
            problem = stream.problem or ("" if head else "empty")
            return None, lf.Read(source=file.name, formats=(), bytes=len(head), problem=problem)
    except OSError as error:
        problem = error.strerror or str(error)
    except Exception as error:  # noqa: BLE001 - the wall around a reader of foreign files
        problem = f"ddpdoctor cannot read it: {type(error).__name__}: {error}"
    return None, lf.Read(source=file.name, formats=(), problem=problem)


def _read_document(
    reader: DocumentFormat, file: LogFile, stream: FileContent, head: bytes, part: Part
) -> tuple[Part, lf.Read]:
    body = head + stream.fill(MOST_BYTES - len(head))
    cut = (len(body) == MOST_BYTES and bool(stream.read(1))) or bool(stream.problem)
    found = reader.read(Document(source=file.name, path=file.path, body=body, cut=cut, who=file.who))
    part.facts, part.dumps, part.attached = found.facts, found.dumps, found.attached
    problem = stream.problem or found.problem
    if found.log_from is None:
        size, formats = len(body), (reader.name,)
        return part, lf.Read(source=file.name, formats=formats, lines=found.lines, bytes=size, problem=problem)
    stream.put_back(body)
    log, first = _Log(file), found.log_from
    log.formats[reader.name] = None
    what = log.read(stream, b"")
    part.facts += [fact for fact in log.facts if not (isinstance(fact, lf.Stacked) and (fact.spot.line or 0) < first)]
    return part, replace(what, problem=what.problem or problem)


def _read_log(file: LogFile, stream: FileContent, head: bytes, part: Part) -> tuple[Part | None, lf.Read]:
    log = _Log(file)
    what = log.read(stream, head)
    if log.denies_name():
        again, head, _ = open_file(file)
        with again:
            log = _Log(replace(file, who=replace(file.who, rank=None)))
            what = log.read(again, head)
    part.facts, part.span, part.names = log.facts, log.splitter.span, frozenset(log.names)
    return (part if part.facts else None), what


class _Log:
    """A stream of lines. Only the blocks around triggers are read line by line, and the first and the last block."""

    def __init__(self, file: LogFile) -> None:
        self._readers = readers = line_readers()
        self.facts: list[lf.Fact] = []
        self.formats: dict[str, None] = {}
        self.names: set[tuple[str, str]] = set()
        self.lines = 0
        self.bytes = 0
        self.splitter = LogSplitter(file.name, file.who)
        self._info_readers = [reader for reader in readers if b"NCCL INFO" in reader.triggers]
        self._awake = [reader for reader in readers if not reader.begins]
        self._funnel = Funnel(readers)
        self._counts: Counter[object] = Counter()
        self._ended = False  # whether the processes of a run have ended
        # Whether the previous block was read line by line. A fact may begin there and end in this block.
        self._goes_on = True

    def read(self, stream: FileContent, head: bytes) -> lf.Read:
        """Read it to its end."""
        rest = b""
        block = head or stream.read(BLOCK_BYTES)
        while block:
            self.bytes += len(block)
            block = rest + (block.replace(b"\0", b"") if b"\0" in block else block)
            at = block.rfind(b"\n") + 1
            if at == 0 and len(block) > HEAD_BYTES:  # a line that is longer than a block is cut at its end
                at = block.rfind(b"\r") + 1 or len(block)
            whole, rest = block[:at], block[at:]
            block = stream.read(BLOCK_BYTES) if self.bytes < MOST_UNPACKED else b""
            self._take(whole, last=not block)
        self._take(rest, last=True)
        ending = [reader for reader in self._awake if type(reader).end is not LineReader.end]
        self._keep([(reader.name, fact) for reader in ending for fact in reader.end()])
        problem = stream.problem or ("longer than 64 GiB" if self.bytes >= MOST_UNPACKED else "")
        source, formats = self.splitter.source, tuple(self.formats)
        return lf.Read(source=source, formats=formats, lines=self.lines, bytes=self.bytes, problem=problem)

    def _keep(self, found: Iterable[tuple[str, lf.Fact]]) -> None:
        """Keep what readers of these names found, but not endless repetitions."""
        for name, fact in found:
            if isinstance(fact, lf.Launched) and fact.by_step and not self._ended:
                continue
            self.formats[name] = None
            has_timed_out = isinstance(fact, lf.Waiting) and fact.timed_out
            self._ended = self._ended or has_timed_out or isinstance(fact, lf.Exited | lf.Stopped | lf.Finished)
            if isinstance(fact, lf.Launched | lf.Restarted):
                self._counts.clear()
                self._ended = False
            key = _likeness(fact)
            self._counts[key] += 1
            if self._counts[key] <= MOST_ALIKE:
                self.facts.append(fact)
            elif isinstance(fact, lf.Moving | lf.Reached):  # the newest progress replaces the one before it
                former = (at for at in range(len(self.facts) - 1, -1, -1) if _likeness(self.facts[at]) == key)
                self.facts[next(former)] = fact

    def denies_name(self) -> bool:
        """Return whether lines of a file that is named after a rank are those of other ranks."""
        rank = self.splitter.known.rank
        if rank is None:
            return False
        own = (fact.who for fact in self.facts if isinstance(fact, lf.Failed | lf.Exited | lf.Waiting | lf.Reached))
        said = {who.rank for who in own} | {who.group_rank for who in own if not who.group} | self.splitter.ranks
        return bool(said - {None, rank})

    def _take(self, block: bytes, *, last: bool) -> None:
        wanted = self._funnel.wants(block)
        splits, self._goes_on = wanted or self._goes_on or last, wanted
        if not splits:
            self.lines += block.count(b"\n")
            return
        text = block.decode("utf-8", "replace")
        if len(self.names) < _MOST_NAMES:
            found = ((match[1].upper().replace("-", "_"), match[2]) for match in _JOB_NAMES.finditer(text))
            self.names |= {(_SAME_NAME.get(kind, kind), value) for kind, value in found if value.lower() != "none"}
        lines = [*self.splitter.lines(text, self.lines + 1, WANTED_INFO)]
        said = "\n".join(line.text for line in lines if not line.is_nccl_info)
        awake = self._awake
        self._awake = [form for form in self._readers if form in awake or any(words in said for words in form.begins)]
        readers = ((line, self._info_readers if line.is_nccl_info else self._awake) for line in lines)
        self._keep([(reader.name, fact) for line, those in readers for reader in those for fact in reader.read(line)])
        self.lines += text.count("\n") + (bool(text) and not text.endswith("\n"))
