"""Lines of logs, as readers get them: what a reader is, and how a log is split into messages of their writers.

A reader recognizes its format by content, never by file name. To search for the hundred triggers of all readers costs
most of the time that a log takes: all but letters in lower case is left out first, so that lines of progress, which
differ in numbers, become equal, and each is searched once.

Prefixes of launchers and log collectors come in any nesting. Those that say who wrote a line, where and when are known
by their format. All others are learned: a text of torch or Python that can only begin a line shows what stands
before it, and lines nearby of the same shape confirm it. What is learned names no rank unless it says "rank".
"""

from __future__ import annotations

import json
import re
import string
from bisect import bisect_right
from calendar import timegm
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ddpdoctor.model.log_facts import MOST_RANKS, Spot, Time, Who
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ddpdoctor.model.attached import AskedNodes, AttachedJob
    from ddpdoctor.model.log_facts import Fact, FlightDump

MOST_QUOTED = 240  # our choice: this many characters are enough to understand any line


def quote(text: str) -> str:
    """Return the beginning of a text in one line, without what looks like a credential."""
    short = " ".join(text[: 2 * MOST_QUOTED].split())
    shown = hide_in_text(short)
    return shown if len(shown) <= MOST_QUOTED else shown[: MOST_QUOTED - 1] + "…"


AGENTS = (
    "Setting OMP_NUM_THREADS environment variable for each process",  # torchrun
    "Starting elastic_operator with launch configs",  # torchrun
)
_LIGHTNING = "Initializing distributed: GLOBAL_RANK: 0"
_RAS = " compiled with CUDA"  # each report of NCCL's RAS begins with the version as well, and no job begins there
NCCL_INFO = " NCCL INFO "
_NCCL = "NCCL version "  # NCCL's first line in a job begins with it. Errors of NCCL have it in their middle.
_RESTART = "will restart worker group"  # torchrun


@dataclass(slots=True, kw_only=True)
class Line:
    """One line of a log, without the prefixes of launchers and log collectors."""

    text: str  # Without prefixes, colors and line end. A carriage return ends a line as well.
    number: int
    source: str
    who: Who = field(default_factory=Who)  # the writer, as far as the prefixes and the path of the file tell
    time: Time | None = None  # the time in the prefixes
    raw_prefix: str = ""  # The prefixes as they stood. Lines of one writer have equal ones, times and numbers apart.
    origin: tuple[str, ...] = ()  # what prefixes of unknown formats say about the writer: equal for lines of one writer
    # Equal for lines of one writer, as far as prefixes tell. Tracebacks of several ranks are told apart by it.
    stream: tuple[Any, ...] = field(init=False)
    begins_job: bool = field(init=False)  # the ranks are started with this line for the first time
    # The same, for the first time or again: what a reader has held back belongs before it.
    begins_run: bool = field(init=False)
    # Only the reader of NCCL's log reads it: with NCCL_DEBUG=INFO such lines are most of a log.
    is_nccl_info: bool = field(init=False)

    def __post_init__(self) -> None:
        who, text = self.who, self.text
        self.stream = (who.rank, who.local_rank, who.task, who.pid, who.host, self.origin)
        has_version = _NCCL in text
        self.is_nccl_info = not has_version and NCCL_INFO in text
        by_nccl = has_version and _RAS not in text and (text.startswith(_NCCL) or f"NCCL INFO {_NCCL}" in text)
        self.begins_job = by_nccl or AGENTS[0] in text or AGENTS[1] in text or _LIGHTNING in text
        self.begins_run = self.begins_job or _RESTART in text

    def spot(self) -> Spot:
        return Spot(source=self.source, line=self.number)

    def says(self, who: Who | None = None) -> dict[str, Any]:
        """Return the fields that a fact has from it; ``who`` replaces the writer."""
        spot = Spot(source=self.source, line=self.number)
        return {"who": who or self.who, "spot": spot, "time": self.time, "said": quote(self.text)}


class LineReader(Protocol):
    """Reads one format in logs. There is one object of it for each stream of lines, so that it may keep state.

    Only parts of a log that contain a trigger are handed to readers line by line: 64 KiB or more around it. A reader
    must keep little: a log may have a thousand million lines.
    """

    name: str  # the format in words: "NCCL watchdog"
    # Without one of these texts no line begins what it reads. It gets no lines before the first that has one.
    begins: tuple[str, ...] = ()
    triggers: tuple[bytes, ...]  # a part of a log that contains none of them is of no interest to this reader

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line. It must be quick for lines of other formats."""

    def end(self) -> Iterable[Fact]:
        """Return the facts that were still open when the log ended: none, if no fact needs a second line."""
        return ()


@dataclass(slots=True, kw_only=True)
class Document:
    """A file that is read as a whole: a dump, a report of RAS, the output of py-spy."""

    source: str  # its name as the user gave it
    path: Path | None  # None for standard input and parts of archives
    body: bytes  # Its content, unpacked. At most ``MOST_BYTES`` of it; see ``cut``.
    cut: bool = False  # whether the file is longer than that
    # What its path says: a host in the name of a folder, a rank at the end of its name.
    who: Who = field(default_factory=Who)


@dataclass(slots=True, kw_only=True)
class Found:
    """The contents of one document."""

    facts: list[Fact] = field(default_factory=list)
    dumps: list[FlightDump] = field(default_factory=list)
    problem: str = ""  # why it could not be read completely, or empty
    lines: int = 0
    log_from: int | None = None  # The file is a log as well. What it says of stacks before this line is in ``facts``.
    attached: AttachedJob | AskedNodes | None = None  # the folder of ``attach`` that it belongs to


class DocumentFormat(NamedTuple):
    """A format of whole files."""

    name: str  # the format in words: "flight recorder dump"
    recognizes: Callable[[bytes], bool]  # takes the bytes with which a file begins, up to 64 KiB
    read: Callable[[Document], Found]  # Damage is reported in ``Found.problem`` and never raised.


_MOST_IDLE = 4096
_LONG = 512
_LOWER = bytes(range(256)).lower()
_LEFT_OUT = bytes(set(range(256)) - set(f"{string.ascii_letters}\n".encode()))


def condense(text: bytes) -> bytes:
    """Return the letters of each line of a text in lower case."""
    return text.translate(_LOWER, _LEFT_OUT)


@cache
def condensed_triggers(triggers: frozenset[bytes]) -> tuple[bytes, ...]:
    """Return the fewest condensed strings of which each of these triggers contains one."""
    kept: list[bytes] = []
    for trigger in sorted({condense(trigger) for trigger in triggers}, key=lambda trigger: (len(trigger), trigger)):
        if not any(shorter in trigger for shorter in kept):
            kept.append(trigger)
    return tuple(kept)


class Funnel:
    """Tells which parts of one log the readers want. It keeps the lines that it knows to be of no interest."""

    def __init__(self, readers: Iterable[LineReader]) -> None:
        self._triggers = condensed_triggers(frozenset(trigger for reader in readers for trigger in reader.triggers))
        self._idle: set[bytes] = set()

    def wants(self, block: bytes) -> bool:
        new = set(condense(block).split(b"\n")) - self._idle
        text = b"\n".join(new)
        if any(trigger in text for trigger in self._triggers):
            return True
        if len(self._idle) < _MOST_IDLE:
            self._idle |= {line for line in new if len(line) < _LONG}
        return False


# C++ has no leading zero of the month, Python has.
_TIME = re.compile(
    r"\[?[IWEF](?P<month>\d{1,2})(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\.(?P<part>\d{6,9}) "
)
_NO_YEAR = 1970


def origin_of(line: Line, who: Who | None = None) -> dict[str, Any]:
    """Return the same as ``Line.says``, with the time of torch's own head where the prefixes have none."""
    return {**line.says(who), "time": time_of(line)}


def time_of(line: Line) -> Time | None:
    """Return the time that the prefixes say, else that of the head of torch's own log.

    That has no year. It gets its own clock, so it is never compared with a time that has a year.
    """
    if line.time is not None:
        return line.time
    found = _TIME.search(line.text)
    if found is None:
        return None
    date = map(int, (found["month"], found["day"], found["hour"], found["minute"], found["second"]))
    try:
        seconds = timegm((_NO_YEAR, *date, 0, 0, 0))
    except ValueError:
        return None
    clock = f"{line.who.host or line.source}, no year"
    return Time(seconds=seconds + float(f"0.{found['part']}"), clock=clock)


# Our choice: the rest of a longer line is not read. The longest useful lines are command lines and environments.
MOST_CHARACTERS = 16_384
_MOST_PREFIXES = 8
_MOST_LEARNED = 160  # our choice: the longest text, in characters, that can be learned as a prefix
_MOST_SHAPES = 32
_MOST_CANDIDATES = 1024
_MOST_COMPARED = 64
_FEW_LINES = 4  # our choice: so many lines that begin alike show a prefix
_NEAR = 12  # our choice: in so many lines on both sides of a text that begins a line, others must have the same prefix
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_MONTHS = {
    "Jan": 1, "Feb": 2, "Mar": 3, "Apr": 4, "May": 5, "Jun": 6,
    "Jul": 7, "Aug": 8, "Sep": 9, "Oct": 10, "Nov": 11, "Dec": 12,
}  # fmt: skip
_HMS = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?"
_ISO = r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[T ]" + _HMS + r"(?:Z|[+-]\d\d:?\d\d| UTC)?"
_AFTER_TIME = r"\]?(?: [|-] |: |\s|$)"
# A space, if the number of spaces is odd: two, four or six are the indentation of Python's tracebacks.
_AFTER_LABEL = r"(?: (?=(?:  )*(?! )))?"
# What log collectors and loggers that write JSON call a message: docker, fluentd, python-json-logger, Google Cloud.
_TEXTS = ("log", "message", "msg", "textPayload", "line")
_FURTHER_TEXTS = ("exc_info", "exception")
_TIMES = ("time", "timestamp", "@timestamp", "asctime", "ts")
# Before "rank": a number within a node, among nodes or within a group, and not the global rank.
_OF_ANOTHER = (
    r"(?i:(?:local|node|host|machine|group|replica|shard|stage|data|tensor|pipeline|model|expert|context|sequence"
    r"|parallel|[cdepstz]p)[ -])"
)
_BRACKETS = tuple(
    map(
        re.compile,
        (
            r"\[rank:? ?(?P<rank>\d+)\]:? ?",  # torch, and Lightning's "[rank: 3]"
            # A template of torchrun's of one's own.
            rf"\[(?![^\]\[]{{0,40}}\b{_OF_ANOTHER}rank)"
            r"[^\]\[]{0,40}\brank[=: ]?(?P<rank>\d+)\b[^\]\[]{0,40}\]:?" + _AFTER_LABEL,
            # mpirun, horovodrun, SageMaker
            r"\[(?:\d+,)?(?:mpirank:)?(?P<rank>\d+)(?:,[\w.-]{1,60})?\](?:\[[^\]]{0,60}\])?<(?:stdout|stderr|stddiag)>:"
            + _AFTER_LABEL,
            r"\[" + _ISO + _AFTER_TIME,
            r"\[pod/(?P<host>[^/\]\s]{1,253})/[^\]\s]{1,253}\] ?",  # kubectl logs --prefix
            r"\[\s*(?P<boot>\d+\.\d{6})\] ?",  # dmesg
            r"\[[A-Z][a-z]{2} (?P<month>[A-Z][a-z]{2}) +(?P<day>\d+) " + _HMS + r" (?P<year>\d{4})\] ?",  # dmesg -T
            # torchrun: the role and the local rank
            r"\[(?!(?:node|host|machine|pod|server|step|epoch|iter|batch|stage|layer|group|job|task|attempt|run)\d)"
            r"[A-Za-z_][\w-]{0,40}?(?<![-_\d])(?P<local_rank>\d+)\]:" + _AFTER_LABEL,
            r"\[" + _HMS + _AFTER_TIME,
            r"\[\d{3,}\] ",  # the line numbers of a viewer
        ),
    )
)
_TORCH = _BRACKETS[0]
_DELIMITERS = " \t:|>])}-"
_MARKS = re.compile(r"(?:[>*│┃] |std(?:out|err): )+")  # what quotes, lists and launchers put before each line
_STREAM = re.compile(r"std(?:out|err)")
_TASK = r"(?<![a-z] )(?<![a-z])\s*(?P<task>\d{1,6}): "
# Dates and times, the task numbers of ``srun -l``, and the border of a table.
_DIGITS = tuple(map(re.compile, (_ISO + _AFTER_TIME, _HMS + r"(?: \| |\s)", _TASK, r"\s*\|\s")))
_NO_HOST = (
    r"(?!(?:epoch|step|iter|iteration|batch|ep|it|fold|run|try|attempt|layer|stage|cuda|gpu|device|loss|top|acc"
    r"|[a-z])-?\d+: )"
)
_WORDS = tuple(
    map(
        re.compile,
        (
            r"rank(?P<rank>\d+): ",
            r"(?P<month>[A-Z][a-z]{2}) +(?P<day>\d+) "
            + _HMS
            + r" (?P<host>[\w.-]{1,63}) [\w./()-]{1,40}(?:\[\d+\])?: ",  # syslog
            # pdsh and DeepSpeed: "worker-1: ". Only names with a digit, so that no ordinary word counts as a host.
            _NO_HOST + r"(?=[a-z-]{1,62}\d)(?P<host>[a-z][a-z0-9.-]{1,62}): ",
            r"(?P<host>[A-Za-z][\w.-]{0,61}\d)\s{1,8}\| ?",  # docker compose
        ),
    )
)
# Ray's ``(RayTrainWorker pid=19799, ip=10.72.0.6)``, vLLM's ``(VllmWorker rank=0 pid=85)``, the border of a table.
_OTHERS = (re.compile(r"\((?P<process>[^()]{0,80}\bpid=\d+[^()]{0,80})\) ?"), re.compile(r"\|\s"))
# Also SkyPilot's ``(worker1, rank=1, pid=2231, ip=10.0.0.7)``, which numbers nodes.
_NO_RANK = re.compile(rf"(?:head|worker\d*), |.*\b{_OF_ANOTHER}rank", re.IGNORECASE)
_GLOG = r"\[[EWIF](?:\d{3,4} \d\d:\d\d:\d\d\.\d{1,9})? ?[\w.]{1,60}\.(?:cpp|cc|cu|ts):\d{1,6}\]"
_PYTHON_GLOG = r"[EWI]\d{4} \d\d:\d\d:\d\d\.\d{6} \d{1,9} \S{0,200}torch/"
_HEADER = r"Traceback \(most recent call last\):[ \t]*$"
_FRAME = r'  File "[^"\n]{1,1000}", line \d'
# Texts of torch and Python that stand at the beginning of a line.
_BEGINS = re.compile(
    rf"\[rank\d{{1,7}}\]:|{_GLOG}|{_PYTHON_GLOG}|(?<!Original )(?<!Group )(?<!traceback : ){_HEADER}|{_FRAME}"
    r"|terminate called after throwing|  what\(\):  |frame #\d{1,4}: |Exception raised from \S{1,200} at "
    r"|CUDA kernel errors might be async|Fatal Python error: |(?:Current thread|Thread) 0x[0-9a-f]{8,16}[ (]"
    r"|torch\.distributed\.elastic\.multiprocessing\.errors\.|Root Cause \(first obs|Last error:$"
    r"|\[[\w.-]{1,60}:\d{1,9}\] \*\*\* Process received signal|\[default\d{1,4}\]:|(?<!INFO )NCCL version \d"
    r"|Job summary$|# nThread \d|srun: error: |slurmstepd: error: |\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d{1,6}[]:] ",
    re.MULTILINE,
)
# Each text of ``_BEGINS`` has one of them: to search for these is much quicker.
_IN_BEGINNINGS = (
    "[rank", ".cpp:", ".cc:", ".cu:", ".ts:", "torch/distributed/", "Traceback (most recent", '  File "',
    "terminate called after", "  what():", "frame #", "Exception raised from", "CUDA kernel errors",
    "Fatal Python error", "hread 0x", "multiprocessing.errors.", "Root Cause (", "Last error:",
    "Process received signal", "[default", "NCCL version ", "Job summary", "# nThread", "srun: error",
    "slurmstepd: error", "[20",
)  # fmt: skip
# Stands at the beginning of a line mostly.
_ERROR = re.compile(r"(?<![\w.'\"])(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception): ")
# The beginning of a message, where two processes wrote into one line.
_SECOND = re.compile(
    rf"(?:\[[A-Za-z_][\w-]{{0,40}}\d\]:)?\[rank\d{{1,7}}\]:(?: ?(?={_GLOG})| {_HEADER}|   File \"|     )|{_GLOG}"
    rf"|(?<![\"'`])\[rank\d{{1,7}}\]: (?={_ERROR.pattern})"
    rf"|{_PYTHON_GLOG}|(?<![\s:\]>|){{\"'/]){_HEADER}"
)
_NEVER_INDENTED = re.compile(
    rf"[ \t]+(?:\[rank\d{{1,7}}\]:|{_GLOG}|{_PYTHON_GLOG}|{_HEADER}|Root Cause \(first obs"
    r"|torch\.distributed\.elastic\.multiprocessing\.errors\.|terminate called after throwing)"
)
# A line of torchrun's table, whose tracebacks are indented.
_TABLE = re.compile(r"\s+(?:time|host|rank|exitcode|error_file|traceback) *: ")
# The end of a message of another process: a progress bar, an exception, a frame.
_NO_PREFIX = re.compile(rf"\d%\||^{_ERROR.pattern}|^\s*File \"")
_BOUNDARY = re.compile(r"(?<=[:|>\])}-]) ?(?=\S)|(?<=\s)(?=\S)")
_LEVEL = r"TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|ERR|CRITICAL|FATAL|SUCCESS|SEVERE"
_LEVEL_WORDS = _LEVEL.split("|")
_LOOSE = {
    "iso": r"\d{4}[-/]\d\d[-/]\d\d(?:[T _]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)?",
    "day": r"(?:(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} {1,2}\d{1,2}|\d\d[-/]\d\d(?:[-/]\d\d(?:\d\d)?)?)[ T]\d\d:\d\d:\d\d"
    r"(?:[.,]\d{1,9})?(?: \d{4})?",
    "clock": r"(?:\d{1,2}:\d\d:\d\d(?:[.,]\d{1,9})?|\d{1,10}(?:\.\d{1,9})?s?)",
    "place": r"(?:[\w./<>-]{1,100}\.(?:py|cc|cpp|go|rs|js)[:#]\d{1,6}|[\w.]{1,80}:[A-Za-z_<][\w<>]{0,80}:\d{1,6})",
    "stream": r"(std(?:out|err))(?: [FP])?",
    "name": r"((?=[\w.-]{0,60}?\d)[\w.-]{1,80})",
}
# What a prefix is made of. Names and numbers may be those of the writer; the others are not.
_TOKENS = re.compile(
    rf"(?P<iso>{_LOOSE['iso']})|(?P<day>{_LOOSE['day']})"
    r"|(?P<clock>(?<![\w.])(?:\d{1,2}:\d\d:\d\d(?:[.,]\d{1,9})?|\d{1,9}\.\d{1,9}s?|1\d{9}(?:\.\d{1,9})?)(?![\w.]))"
    rf"|(?P<level>\b(?:{_LEVEL}|{_LEVEL.lower()}|{'|'.join(word.title() for word in _LEVEL_WORDS)})\b *)"
    r"|(?P<place>[\w./<>-]{1,100}\.(?:py|cc|cpp|go|rs|js)[:#]\d{1,6}|[\w.]{1,80}:[A-Za-z_<][\w<>]{0,80}:\d{1,6}\b)"
    r"|(?P<stream>\bstd(?:out|err)\b [FP]\b|\bstd(?:out|err)\b)"
    r"|(?P<name>(?=[\w.-]{0,60}?\d)[\w.-]{1,80})"
    r"|(?P<word>[^\W\d]+|\s+|.)"
)
_RANK_LABEL = re.compile(rf"(?<![A-Za-z_-])(?P<of>local_|global_|mpi|{_OF_ANOTHER})?rank[=: ]?(?P<rank>\d{{1,7}})\b")
_RANKS_OF = {"": "rank", "global": "rank", "mpi": "rank", "local": "local_rank"}
_DATED_S = 10**9  # a smaller number of seconds has no date
_NOBODY = Who()


@dataclass(slots=True)
class _Shape:
    pattern: re.Pattern[str]
    # The groups of the pattern whose numbers grow from line to line: they say nothing about the writer.
    counters: frozenset[int] = frozenset()
    names_rank: bool = True  # False: the number that it calls a rank is not that of torch's own labels

    def ranks_of(self, match: re.Match[str]) -> dict[str, Any]:
        """Return the fields of ``Who`` that it gives."""
        for label in _RANK_LABEL.finditer(match[0]) if self.names_rank else ():
            name = _RANKS_OF.get((label["of"] or "").lower().rstrip("_ -"))
            if name is not None and int(label["rank"]) < MOST_RANKS:
                return {name: int(label["rank"])}
        return {}


def split_line(raw: str, number: int, source: str, known: Who = _NOBODY) -> Line:
    """Return a line without prefixes of known formats; ``known`` is the writer according to the file's path."""
    return LogSplitter(source, known).split(raw, number)


@dataclass(slots=True)
class LogSplitter:
    """Splits the text of one log, and learns its prefixes on the way."""

    source: str
    known: Who = _NOBODY  # What the path of the file says about the writer of all its lines. Prefixes add to it.
    ranks: set[int] = field(default_factory=set)  # the ranks that prefixes have named
    # The first and the last time in prefixes, in seconds since the epoch, if they have dates.
    span: tuple[float, float] | None = None
    _shapes: dict[str, _Shape] = field(default_factory=dict)
    # Shapes that may be prefixes, and how many texts that begin a line stood behind them.
    _candidates: dict[str, int] = field(default_factory=dict)
    _is_begun: bool = False
    # What a viewer has put before each line: its number, and the seconds since the start.
    _numbering: re.Pattern[str] | None = None
    _indentation: str = ""  # what all lines from here on are indented by

    def lines(self, text: str, number: int, wanted_info: re.Pattern[str] | None = None) -> Iterator[Line]:
        """Yield the messages of whole lines; ``wanted_info`` tells which of NCCL INFO are read.

        A progress bar writes many states into one line, and two processes may write into one: each becomes a line.
        """
        if "\x1b" in text:
            text = _ESCAPES.sub("", text)
        raws = [_unpacked(raw.removesuffix("\r")) for raw in text.removesuffix("\n").split("\n")] if text else []
        doubtful = self._learn(raws)
        for at, raw in enumerate(raws):
            writer = self.known
            parts = raw.split("\r") if "\r" in raw else [raw]
            for part in parts:
                if len(parts) > 1 and not part.strip():
                    continue
                if wanted_info is not None and NCCL_INFO in part and _NCCL not in part and not wanted_info.search(part):
                    continue
                line = self.split(part, number + at, writer)
                writer = line.who  # a prefix stands once before all states of a bar
                if at in doubtful:
                    yield from self._separate(line)
                else:
                    yield line

    def split(self, raw: str, number: int, known: Who | None = None) -> Line:
        text = raw[:MOST_CHARACTERS]
        if "\x1b" in text:
            text = _ESCAPES.sub("", text)
        said: dict[str, Any] = {}
        time: Time | None = None
        origin: tuple[str, ...] = ()
        at = self._end_of_number(text) if self._numbering is not None else 0
        for _ in range(_MOST_PREFIXES):
            if (match := _match_prefix(text, at)) is not None:
                fields = {name: value for name, value in match.groupdict().items() if value is not None}
                is_torchs = match.re is _TORCH
                said = {**said, **_who_fields(fields)} if is_torchs else {**_who_fields(fields), **said}
                time = time or _prefix_time(fields)
            elif (learned := self._match_learned(text, at)) is not None:
                shape, match = learned
                names = (name for group, name in enumerate(match.groups(), 1) if group not in shape.counters)
                origin += (shape.pattern.pattern, *(name for name in names if name))
                said = {**shape.ranks_of(match), **said}
            else:
                break
            at = match.end()
        known = self.known if known is None else known
        who = replace(known, **said) if said else known
        if "rank" in said:
            self.ranks.add(said["rank"])
        if time is not None:
            clock = who.host or self.source
            time = replace(time, clock=clock if time.seconds > _DATED_S else f"{clock}, no date")
            if time.seconds > _DATED_S:
                first, last = self.span or (time.seconds, time.seconds)
                self.span = (min(first, time.seconds), max(last, time.seconds))
        return Line(
            text=text[at:], number=number, source=self.source, who=who, time=time, raw_prefix=text[:at], origin=origin
        )  # fmt: skip

    def _match_learned(self, text: str, at: int) -> tuple[_Shape, re.Match[str]] | None:
        for shape in self._shapes.values():
            if (match := shape.pattern.match(text, at)) is not None and match.end() > at:
                return shape, match
        return None

    def _end_of_number(self, text: str) -> int:
        number = self._numbering.match(text) if self._numbering is not None else None
        return number.end() if number is not None else 0

    def _end_of_prefixes(self, text: str) -> int:
        at = self._end_of_number(text)
        for _ in range(_MOST_PREFIXES):
            match = _match_prefix(text, at)
            if match is None:
                learned = self._match_learned(text, at)
                if learned is None:
                    break
                match = learned[1]
            at = match.end()
        return at

    def _separate(self, line: Line) -> Iterator[Line]:
        for _ in range(_MOST_PREFIXES):
            second = _SECOND.search(line.text, 1)
            if second is None:
                break
            at = second.start()
            # What stands before a second message without a rank may be a prefix that was not learned.
            writer = line.who if line.who.rank is None else Who(host=line.who.host, address=line.who.address)
            other = self.split(line.text[at:], line.number, writer)
            yield replace(line, text=line.text[:at])
            line = replace(other, time=other.time or line.time, origin=line.origin + other.origin)
        yield line

    # learning

    def _learn(self, raws: list[str]) -> set[int]:
        """Learn prefixes, and take common indentation off. Return the lines that may hold more than one message."""
        self._dedent(raws)
        if not self._is_begun:
            self._is_begun = True
            self._learn_common(raws)
        doubtful = set()
        last, end = -1, 0
        for at, column in _beginnings(raws):
            if at in doubtful:
                continue
            raw = raws[at]
            if "\r" in raw:
                doubtful.add(at)
                continue
            end = end if at == last else self._end_of_prefixes(raw)
            last = at
            if column <= end:
                continue
            doubtful.add(at)
            # Known prefixes may reach from a prefix of unknown format up to the text.
            ends = (found.end() for found in _BOUNDARY.finditer(raw, end, column))
            unknown = (at for at in ends if _leads(raw, at, column))
            pattern = _pattern_of(raw[end : next(unknown, column)])
            if pattern is None or pattern in self._shapes or len(self._candidates) >= _MOST_CANDIDATES:
                continue
            self._candidates[pattern] = self._candidates.get(pattern, 0) + 1
            near = [*raws[max(at - _NEAR, 0) : at], *raws[at + 1 : at + 1 + _NEAR]]
            if self._candidates[pattern] > 1 or self._count(re.compile(pattern), near) > 1:
                self._add(pattern, raws)
        if not doubtful and not self._shapes:
            self._learn_by_errors(raws)
        return doubtful

    def _learn_common(self, raws: list[str]) -> None:
        """Learn what precedes all of the first lines, if it is not part of a message: quotes and streams."""
        full = [raw for raw in raws if raw.strip()][:_MOST_COMPARED]
        if len(full) < _FEW_LINES:
            return
        self._numbering = _numbering_of(full)
        if self._numbering is not None:
            return
        marks = {_STREAM.sub("stderr", match[0]) if (match := _MARKS.match(f"{raw} ")) else "" for raw in full}
        pattern = _pattern_of(marks.pop()) if len(marks) == 1 else None
        if pattern is not None:
            self._add(pattern, raws)

    def _learn_by_errors(self, raws: list[str]) -> None:
        """Learn what stands before an exception, if it stands before most of the lines."""
        for raw in (raw for raw in raws if "Error: " in raw or "Exception: " in raw):
            end = self._end_of_prefixes(raw)
            error = _ERROR.search(raw, end)
            pattern = _pattern_of(raw[end : error.start()]) if error is not None else None
            if pattern is None or pattern in self._candidates or len(self._candidates) >= _MOST_CANDIDATES:
                continue
            self._candidates[pattern] = 0
            full = sum(bool(text.strip()) for text in raws)
            if self._count(re.compile(pattern), raws) >= max(3, 0.6 * full):
                self._add(pattern, raws)
                return

    def _count(self, pattern: re.Pattern[str], raws: Sequence[str]) -> int:
        ends = ((raw, pattern.match(raw, self._end_of_prefixes(raw))) for raw in raws)
        return len({raw[match.end() :] for raw, match in ends if match is not None and raw[match.end() :].strip()})

    def _add(self, pattern: str, raws: Sequence[str]) -> None:
        if len(self._shapes) >= _MOST_SHAPES:
            return
        shape = _Shape(re.compile(pattern))
        numbers: dict[int, list[int]] = {}
        for raw in raws:
            match = shape.pattern.match(raw, self._end_of_prefixes(raw))
            if match is None:
                continue
            for group, name in enumerate(match.groups(), 1):
                if name and name.isdecimal():
                    numbers.setdefault(group, []).append(int(name))
            inner = _TORCH.match(raw, match.end())
            rank = shape.ranks_of(match).get("rank")
            if inner is not None and rank is not None and rank != int(inner["rank"]):
                shape.names_rank = False
        many = (group for group, seen in numbers.items() if len(set(seen)) > max(2, 0.6 * len(seen)))
        shape.counters = frozenset(group for group in many if numbers[group] == sorted(numbers[group]))
        self._shapes[pattern] = shape

    def _dedent(self, raws: list[str]) -> None:
        at = 0
        while self._indentation and at < len(raws):
            if raws[at].strip() and not raws[at].startswith(self._indentation):
                self._indentation = ""
                break
            raws[at] = raws[at].removeprefix(self._indentation)
            at += 1
        if not self._is_begun and at == 0:
            margins = [raw[: len(raw) - len(raw.lstrip())] for raw in raws if raw.strip()]
            self._indentation = _common_margin(margins) if len(margins) >= _FEW_LINES else ""
            if self._indentation:
                raws[:] = [raw.removeprefix(self._indentation) for raw in raws]
                return
        for begins in range(at, len(raws)):
            raw = raws[begins]
            if begins < at or not raw.startswith((" ", "\t")) or _NEVER_INDENTED.match(raw) is None:
                continue
            indentation = raw[: len(raw) - len(raw.lstrip())]
            first, last = begins, begins
            while first > at and (not raws[first - 1].strip() or raws[first - 1].startswith(indentation)):
                first -= 1
            while last + 1 < len(raws) and (not raws[last + 1].strip() or raws[last + 1].startswith(indentation)):
                last += 1
            if "Traceback" in raw and any(_TABLE.match(row) for row in raws[first : last + 1]):
                continue
            raws[first : last + 1] = [row.removeprefix(indentation) for row in raws[first : last + 1]]
            at = last + 1
            if at == len(raws):
                self._indentation = indentation


def _unpacked(raw: str) -> str:
    """Return the message in a line of JSON, behind its time; other lines as they are."""
    if not raw.startswith('{"') or not raw.endswith("}") or len(raw) > 4 * MOST_CHARACTERS:
        return raw
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    texts = [record[name] for name in _TEXTS if isinstance(record.get(name), str)][:1]
    if not texts:
        return raw
    texts += [record[name] for name in _FURTHER_TEXTS if isinstance(record.get(name), str)]
    times = (record[name] for name in _TIMES if isinstance(record.get(name), str))
    time = next((f"{time} " for time in times if re.fullmatch(_ISO, time)), "")
    return time + "\n".join(texts).rstrip().replace("\n", "\r")  # as the states of a bar: several messages in one line


def _numbering_of(raws: Sequence[str]) -> re.Pattern[str] | None:
    """Return the pattern of the numbers that grow from line to line, and of times, with which all lines begin."""
    parts = [r"\s*"]
    numbers = end = 0
    for column in zip(*([*_TOKENS.finditer(raw.lstrip()[:_MOST_LEARNED])] for raw in raws), strict=False):
        words = [token[0] for token in column]
        if all(word.isdecimal() for word in words):
            values = list(map(int, words))
            if not all(0 < after - before < _NEAR for before, after in pairwise(values)):
                break
            numbers += 1
            parts.append(r"\d{1,12}")
        elif all(token.lastgroup == "clock" for token in column):
            parts.append(_LOOSE["clock"])
        elif all(word.isspace() for word in words):
            same = _common_margin(words)  # what goes beyond it is indentation of the text
            parts.append(re.escape(same))
            if len(set(words)) > 1:
                end = len(parts) if same else end
                break
        elif len(set(words)) == 1 and words[0] in _DELIMITERS:
            parts.append(re.escape(words[0]))
        else:
            break
        if words[0].isspace() or words[0] in _DELIMITERS:
            end = len(parts)
    if not numbers or not end:
        return None
    return re.compile("".join(parts[:end]))


def _common_margin(margins: Sequence[str]) -> str:
    low, high = min(margins), max(margins)
    same = (at for at, (letter, other) in enumerate(zip(low, high, strict=False)) if letter != other)
    return low[: next(same, len(low))]


def _beginnings(raws: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the line and column of each text in the middle of a line that can only begin a message."""
    text = "\n".join(raws)
    starts: list[int] = []
    numbers: set[int] = set()
    for words in _IN_BEGINNINGS:
        at = text.find(words)
        while at >= 0:
            if at and text[at - 1] != "\n":
                starts = starts or [0, *accumulate(len(raw) + 1 for raw in raws)]
                numbers.add(bisect_right(starts, at) - 1)
                at = starts[bisect_right(starts, at)] - 1  # the next line
            at = text.find(words, at + 1)
    for number in sorted(numbers):
        for match in _BEGINS.finditer(raws[number]):
            if match.start() > 0 and raws[number][match.start() - 1] != "\r":
                yield number, match.start()


def _pattern_of(prefix: str) -> str | None:
    """Return the pattern of all prefixes that have the shape of this one, or None if it is a message."""
    if (
        not prefix.strip()
        or len(prefix) > _MOST_LEARNED
        or prefix[-1] not in _DELIMITERS
        or _NO_PREFIX.search(prefix) is not None
    ):
        return None
    parts = []
    for token in _TOKENS.finditer(prefix):
        kind, words = token.lastgroup or "", token[0]
        if kind == "level":  # all levels, written like this one; with several spaces behind it, they are a column
            level = words.rstrip()
            change = str.lower if level.islower() else str.upper if level.isupper() else str.title
            spaces = len(words) - len(level)
            levels = [change(word) for word in _LEVEL_WORDS]
            if spaces > 1:
                levels = [level.ljust(len(words)) for level in levels if len(level) < len(words)]
            parts.append(f"(?:{'|'.join(levels)})" + (" " if spaces == 1 else ""))
        elif kind == "word" and words.isspace() and token.end() == len(prefix):
            parts.append(f"(?:{re.escape(words)}|$)")
        else:
            parts.append(_LOOSE.get(kind) or re.escape(words))
    return "".join(parts)


def _leads(raw: str, at: int, end: int) -> bool:
    while at < end and (known := _match_prefix(raw, at)) is not None and known.end() <= end:
        at = known.end()
    return at == end


def _match_prefix(text: str, at: int) -> re.Match[str] | None:
    first = text[at : at + 1]
    if first == "[":
        patterns = _BRACKETS
    elif first.isdigit() or first == " ":
        patterns = _DIGITS
    else:
        patterns = _WORDS if first.isalpha() else _OTHERS
    return next((match for pattern in patterns if (match := pattern.match(text, at))), None)


def _who_fields(fields: dict[str, str]) -> dict[str, Any]:
    if "process" in fields:
        pairs = dict(re.findall(r"\b(pid|ip|rank)=([\w.:]+)", fields["process"]))
        if _NO_RANK.match(fields["process"]):
            pairs.pop("rank", None)
        fields = {"address" if name == "ip" else name: value for name, value in pairs.items()}
    found: dict[str, Any] = {name: fields[name] for name in ("host", "address") if name in fields}
    for name in ("rank", "local_rank", "task", "pid"):
        if fields.get(name, "").isdigit() and int(fields[name]) < MOST_RANKS:
            found[name] = int(fields[name])
    return found


def _prefix_time(fields: dict[str, str]) -> Time | None:
    """Return the time in a prefix. A time without a date is comparable only to other such times."""
    if "boot" in fields:
        return Time(seconds=float(fields["boot"]), clock="")
    if "hour" not in fields:
        return None
    month = fields.get("month", "1")
    date = (fields.get("year", "1970"), _MONTHS.get(month, month), fields.get("day", "1"))
    try:
        seconds = timegm((*map(int, (*date, fields["hour"], fields["minute"], fields["second"])), 0, 0, 0))
    except ValueError:
        return None
    return Time(seconds=seconds + float(f"0.{fields.get('part', '0')}"), clock="")
