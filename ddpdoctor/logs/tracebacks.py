"""Tracebacks of Python in logs: with or without rank prefixes, and of several interleaved processes."""

from __future__ import annotations

import builtins
import re
import string
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from ddpdoctor.logs.errors import Reading, classify, named_cause
from ddpdoctor.logs.lines import LineReader, condense, origin_of, quote, time_of
from ddpdoctor.logs.stacks import foreign_frame
from ddpdoctor.model.known_errors import find_known, read_known_errors
from ddpdoctor.model.log_facts import ErrorLine, Exited, Failed, Link, Nature, Operation, Stopped, Waiting

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ddpdoctor.logs.lines import Line
    from ddpdoctor.model.known_errors import KnownError
    from ddpdoctor.model.log_facts import Fact
    from ddpdoctor.model.stacks import Frame

HEADER = "Traceback (most recent call last):"
_MOST_FRAMES = 120
_MOST_MESSAGE_LINES = 30
_MOST_CHARACTERS = 4000
_FILE = re.compile(r'^\s+File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,300}?))?\s*$')
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,200}(?:\(\w{1,100}\))?)(?::(?: (?P<message>.*))?)?$")
_CLASS_NAME = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Group|Empty|Full|Failure|Timeout|Expired|Fault|NotFound|Lost)$"
)
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_NESTED = re.compile(
    r"^(?:Original Traceback \(most recent call last\):|-- Process (?P<process>\d{1,7}) terminated with)"
)
# What stands between the exceptions of a group, and after the last one.
_SUB = re.compile(r"^\s*\+[-+]*-{4,}(?P<number> \d+ -)?")
_BORDER = re.compile(r"^\s*(?:\+ (?=Exception Group)|\| )")
_HEAD = re.compile(
    r"^\[?[IWEF]\d{3,4} \d\d:|^\[[IWEF] |^frame #|^\[\d{4}-|^Exception raised from|^\s*=+\s*$|^\s*-{10,}\s*$"
)
_CONTINUES = re.compile(
    r"^(?:nccl\w+Error:|Last error:|CUDA kernel errors|For debugging consider|Compile with `TORCH|Device-side assert"
    r"|Collectives differ|Search for `cuda|Expected to have finished|E[A-Z]\d{4}: |\[ERROR\] \d{4}-|\t)"
)
# Exceptions that control a loop. An exception raised while one of them is handled is the error.
_FLOW = frozenset(("Empty", "Full", "StopIteration", "StopAsyncIteration"))


class Fed(Enum):
    """How a traceback relates to a line."""

    TAKEN = auto()
    REFUSED = auto()  # it is not a line of this traceback, which may go on
    ENDED = auto()  # it is not a line of this traceback, which has ended


class _At(Enum):
    FRAMES = auto()
    MESSAGE = auto()
    LINK = auto()  # after a line that announces another traceback of the chain


@dataclass(slots=True)
class RaisedText:
    """One exception of a chain."""

    frames: list[Frame] = field(default_factory=list)  # outermost first
    type: str = ""
    lines: list[str] = field(default_factory=list)  # the message
    # It was raised in another process or thread, or is part of a group; the exception before it reports it.
    nested: bool = False

    @property
    def name(self) -> str:
        return self.type.partition("(")[0].rpartition(".")[2]

    @property
    def message(self) -> str:
        return "\n".join(self.lines)[:_MOST_CHARACTERS].strip()


@dataclass(slots=True)
class Traceback:
    """A traceback that is being read. ``sure``: all lines that it is given were written by one process."""

    sure: bool = False
    chain: list[RaisedText] = field(default_factory=lambda: [RaisedText()])
    process: int | None = None  # the number of the spawned process that failed, if ``torch.multiprocessing`` says so
    wants_source: bool = False  # whether the last line was that of a frame, so that its source follows
    _at: _At = _At.FRAMES
    _adjacent: bool = True  # whether the previous line was taken too

    @property
    def is_open(self) -> bool:
        """Whether frames or the exception's line are still to come."""
        return self._at is not _At.MESSAGE

    def feed(self, text: str) -> Fed:
        """Take the next line, if it belongs to this traceback."""
        if self._at is _At.MESSAGE:
            fed = self._feed_message(text)
        elif self._at is _At.FRAMES:
            fed = self._feed_frames(text)
        elif not text.strip():
            fed = Fed.TAKEN
        elif text.rstrip().endswith(HEADER) or _FILE.match(text):
            self._at = _At.FRAMES
            fed = Fed.TAKEN if text.rstrip().endswith(HEADER) else self._feed_frames(text)
        else:
            fed = Fed.REFUSED
        self._adjacent = fed is Fed.TAKEN
        return fed

    def _feed_frames(self, text: str) -> Fed:
        self.wants_source = False
        if (match := _FILE.match(_BORDER.sub("", text))) is not None:
            frames = self.chain[-1].frames
            if len(frames) >= _MOST_FRAMES:
                del frames[_MOST_FRAMES // 2]
            frames.append(foreign_frame(match["file"], int(match["line"]), match["function"] or "<module>"))
            self.wants_source = True
            return Fed.TAKEN
        if text.endswith(HEADER):
            return Fed.REFUSED
        if not text or text[0] in " \t":
            return Fed.TAKEN
        if (match := _RAISED.match(text)) is None:
            return Fed.REFUSED
        raised, name = self.chain[-1], match["type"]
        # Else it may be a line that another process wrote in between.
        is_class = self.sure or _CLASS_NAME.search(name.partition("(")[0]) or ("." in name and ": " in text)
        if not is_class and not (self._adjacent and " " not in name and raised.frames):
            return Fed.REFUSED
        raised.type, raised.lines = name, [match["message"] or ""]
        self._at = _At.MESSAGE
        return Fed.TAKEN

    def _feed_message(self, text: str) -> Fed:
        stripped = text.strip()
        if stripped in _CHAINED:
            return self._link(nested=False)
        if (nested := _NESTED.match(stripped)) is not None:
            self.process = int(nested["process"]) if nested["process"] else self.process
            fed = self._link(nested=True)
            self._at = _At.FRAMES if nested["process"] is None else _At.LINK
            return fed
        if self._in_group() and (sub := _SUB.match(text)) is not None:
            return self._link(nested=True) if sub["number"] else Fed.ENDED
        if not stripped:
            return Fed.TAKEN
        lines = self.chain[-1].lines
        goes_on = self.sure or _CONTINUES.match(text) or lines[-1].strip() == "Last error:"
        is_other = text.rstrip().endswith(HEADER) or _HEAD.match(text)
        if is_other or not goes_on or len(lines) >= _MOST_MESSAGE_LINES:
            return Fed.ENDED
        lines.append(text)
        return Fed.TAKEN

    def _in_group(self) -> bool:
        return any(error.name.endswith("ExceptionGroup") for error in self.chain)

    def _link(self, *, nested: bool) -> Fed:
        self.chain.append(RaisedText(nested=nested))
        self._at = _At.LINK
        return Fed.TAKEN

    def root(self) -> tuple[RaisedText, tuple[Frame, ...]]:
        """Return the exception where it began, and the way to it, outermost frame first."""
        whole = [error for error in self.chain if error.type]
        nested = [error for error in whole if error.nested]
        at = next((error for error in nested or whole if error.name not in _FLOW), whole[-1])
        if at.nested:
            place = next(number for number, raised in enumerate(whole) if raised is at)
            outer = whole[:place][-1:] if not self._in_group() else whole[:1]
            return at, (*(frame for error in outer for frame in error.frames), *at.frames)
        if any(frame.user for frame in at.frames) or at is whole[-1]:
            return at, tuple(at.frames)
        return at, (*whole[-1].frames, *at.frames)


def read_traceback(lines: Iterable[str]) -> Traceback | None:
    """Return the last traceback in a text that one process wrote, or None if there is none."""
    found: Traceback | None = None
    last: Traceback | None = None
    for text in lines:
        if found is not None and found.feed(text) is Fed.TAKEN:
            continue
        if text.rstrip().endswith(HEADER):
            last = found if found is not None and found.chain[0].type else last
            found = Traceback(sure=True)
    return found if found is not None and found.chain[0].type else last


_HARMLESS = (
    "Exception ignored in", "--- Logging error ---", "Error in atexit._run_exitfuncs", "Stack (most recent call last):",
)  # fmt: skip
_GATE = ("rror", "RROR", "xception", "CRITICAL", "FATAL", "raceback", "gnored in", "Stack (most")
# A mistake in the syntax of the script itself has no header, and pastes often begin below it.
_NO_HEADER = re.compile(r'^  File "[^"\n]{1,1000}", line \d{1,9}(?:, in \S.{0,300})?$')
_BARE = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w{0,60}\.){0,8}(?:[A-Za-z_]\w{1,80}(?:Error|Exception)|Exception|KeyboardInterrupt))"
    r"(?:: (?P<message>.+)|:?\s*$)"
)
# An exception behind a prefix that no other line has, and not the name of a metric.
_BEHIND = re.compile(
    r"[:|>\])}-] ?(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception): (?![-+.\d]|(?:nan|inf)\b)\S"
)
# What follows the name of a metric, such as MeanSquaredError.
_MEASURED = re.compile(r"^[-+\d.,:;%()|/\s]*(?:[eE][-+]?\d+|nan|inf|ms|s)?[-+\d.,:;%()|/\s]*$")
# Warnings, what is tried again, the source lines of a traceback, and lines of NCCL, which another reader reads.
_NO_ERROR = re.compile(
    r"^\[?[WID]\d{3,4} |^\[[WID][ :]|\b(?<!NCCL_DEBUG=)(?:WARN(?:ING)?|INFO|DEBUG|TRACE)\b|[Ww]arning:"
    r"|\b[Rr]e-?try(?:ing)?\b|[,;] trying\b|: trying (?:a|again|another|the next|with)\b|(?:^|\s)attempt \d"
    r"|[Ii]gnor(?:e|ing)\b|[Ss]kip(?:ping|ped)?\b|[Ff]all(?:ing)? ?back"
    r"|^\s+(?:raise|return|assert|if|elif|except|with|for|File|self\.|#|\w[\w.]*\()"
)
_ERROR_LEVEL = re.compile(
    r"^\[?[EF]\d{3,4} \d|^\[[EF] |(?:^|[\s\[<|:(-])(?:ERROR|CRITICAL|FATAL|Fatal|fatal error)(?:[\s\]>|:),-]|$)"
    r"|(?:^|: )(?:error|fatal): "
)
_BUILTIN = frozenset(name for name, kind in vars(builtins).items() if isinstance(kind, type))
_NO_DIGITS = str.maketrans("", "", string.digits)
_SHORTEST = 6  # our choice: a trigger of fewer letters would make every part of a log interesting
_MOST_SHAPES = 4096
_WATCHDOG = "Watchdog caught collective operation timeout"
_LIMIT = re.compile(r"Timed out waiting (?P<ms>\d{1,12}) ?ms for (?:recv|send) operation")
_EXITED = re.compile(
    r"process (?P<process>\d{1,7}) terminated with (?:signal (?P<signal>SIG\w+)|exit code (?P<code>\d+))"
)
_GOT = re.compile(r"got signal: (?:Signals\.)?(?P<signal>SIG\w+|\d{1,2})")
_SIGNALS = {"1": "SIGHUP", "SIGHUP": "SIGHUP", "2": "SIGINT", "SIGINT": "SIGINT"}
# How torch_xla reports a process that it started.
_DEVICE = re.compile(r"Exception in device=(?:TPU|XLA|CUDA|GPU|CPU):(?P<local>\d{1,4}): (?P<text>.+)")
_DIED = re.compile(r"Command .{1,4000}? died with <Signals\.(?P<signal>SIG\w+)")
_C10D = re.compile(r"torch[/\\]distributed[/\\](?:distributed_c10d|nn[/\\]functional)\.py$")
_AGENT = re.compile(r"torch[/\\]distributed[/\\](?:run|launch|launcher[/\\]api|elastic[/\\].+)\.py$")
_LAUNCHERS = re.compile(
    r"(?:accelerate[/\\]commands|deepspeed[/\\]launcher)[/\\]|torch[/\\]distributed[/\\](?:run|launch)\.py$"
)
_OPERATIONS = frozenset((
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "gather", "irecv", "isend",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
))  # fmt: skip
_INIT = frozenset(("init_process_group", "new_group", "rendezvous", "_env_rendezvous_handler"))
_MOST_OPEN = 8  # Our choice: the limit of tracebacks whose lines are mixed. Beyond it, the oldest is given up.
_MOST_STREAMS = 4096
_NEAR = 3
_LONG_AGO = 2000


@dataclass(slots=True)
class _Open:
    text: Traceback
    header: Line
    said: Line  # the line of its last exception
    last: int
    harmless: bool = False


class TracebackReader(LineReader):
    """Finds exceptions that ended a rank's script, a thread, a worker or a launcher."""

    name = "Python traceback"

    def __init__(self) -> None:
        marks = [mark for known in read_known_errors() for mark in known.marks]
        self._gate = (*_GATE, *dict.fromkeys(marks))
        # The words of headers and errors. Short ones, such as codes with digits, stand beside longer ones.
        longer = (mark.encode() for mark in marks if len(condense(mark.encode())) >= _SHORTEST)
        self.triggers = (b"raceback", b"rror", b"xception", *longer)
        self._dull: set[str] = set()
        self._shapes: dict[str, KnownError | None] = {}  # what lines without their digits turned out to be
        # Streams in which a table of torchrun quotes a traceback, whose last line is still to come.
        self._in_table: set[Hashable] = set()
        # The stream and line of the last "Last error:", which NCCL's message follows.
        self._last_error: tuple[Hashable, int] = ((), 0)
        self._open: dict[Hashable, list[_Open]] = {}
        # The stream and line of the last text that announced a harmless traceback.
        self._harmless: tuple[Hashable, int] = ((), -_NEAR)

    def read(self, line: Line) -> Iterable[Fact]:
        text = line.text
        if not self._open and not self._tells(text):
            if self._last_error == (line.stream, line.number - 1) or text[:2] == "[E":
                return self._bare(line)
            return self._start_without_header(line) if text.startswith("  File ") else ()
        if self._open and line.begins_run:
            return self.end()
        if any(words in text for words in _HARMLESS):
            self._harmless = (line.stream, line.number)
        is_header = text.rstrip().endswith(HEADER)
        if line.stream not in self._open and not is_header and text.startswith("  File "):
            return self._start_without_header(line)
        found: list[Fact] = []
        opened = self._open.setdefault(line.stream, [])
        # Lines of several processes are mixed, and nothing says whose they are. Processes that fail alike write
        # alike: a frame goes to the one with the fewest frames, a source line to the one whose frame was before.
        is_frame, is_source = text.startswith("  File "), text.startswith("   ")

        def place(block: _Open) -> tuple[bool, bool, int]:
            frames = len(block.text.chain[-1].frames) if is_frame else 0
            return is_source and not block.text.wants_source, not block.text.is_open, frames

        for block in sorted(opened, key=place):
            fed = block.text.feed(text)
            if fed is Fed.TAKEN:
                is_exception = not block.text.is_open and len(block.text.chain[-1].lines) == 1
                block.said = line if is_exception else block.said
                block.last = line.number
                return found
            if fed is Fed.ENDED or (is_header and block.text.sure) or line.number - block.last > _LONG_AGO:
                opened.remove(block)
                found += _facts(block)
        if is_header:
            found += self._start(line)
        elif not opened:
            found += self._bare(line)
        if len(opened) > _MOST_OPEN:
            found += _facts(opened.pop(0))
        if not opened:
            self._open.pop(line.stream, None)
        return found

    def end(self) -> Iterable[Fact]:
        found = [fact for opened in self._open.values() for block in opened for fact in _facts(block)]
        self._open.clear()
        return found

    def _tells(self, text: str) -> bool:
        """Return whether a line has an error word. Lines that differ only in digits are examined once."""
        shape = text.translate(_NO_DIGITS)
        if shape in self._dull:
            return False
        if any(word in text for word in self._gate):
            return True
        if len(self._dull) < _MOST_SHAPES:
            self._dull.add(shape)
        return False

    def _start(self, line: Line) -> Iterable[Fact]:
        before = line.text.rstrip().removesuffix(HEADER).rstrip()
        if before.endswith("traceback :"):  # in the table of torchrun, which is read elsewhere
            self._in_table.add(line.stream)
            return ()
        stream, number = self._harmless
        harmless = stream == line.stream and line.number - number <= _NEAR
        sure = "rank" in line.raw_prefix
        block = _Open(Traceback(sure=sure), header=line, said=line, last=line.number, harmless=harmless)
        self._open.setdefault(line.stream, []).append(block)
        if len(self._open) <= _MOST_STREAMS:
            return ()
        return [fact for block in self._open.pop(next(iter(self._open))) for fact in _facts(block)]  # the oldest stream

    def _start_without_header(self, line: Line) -> Iterable[Fact]:
        if _NO_HEADER.match(line.text) and line.stream not in self._in_table:
            found = self._start(line)
            self._open[line.stream][-1].text.feed(line.text)
            return found
        return ()

    def _bare(self, line: Line) -> list[Fact]:
        """Read an error whose traceback is lacking: a paste that begins too late, or a log searched for errors."""
        text = line.text
        if (ended := _EXITED.search(text)) is not None and "Failed" not in text:
            return [_child_ended(ended, origin_of(line))]
        if (died := _DIED.search(text)) is not None:
            return [Exited(signal=died["signal"], **origin_of(line))]
        match = _BARE.match(text)
        if match is not None and line.stream in self._in_table:
            self._in_table.discard(line.stream)
            return []
        if match is not None and "[rank" in line.raw_prefix:  # torch writes it before an exception that ends the script
            found = list(self._start(line))
            self._open[line.stream][-1].text.feed(text)  # the message may go on
            return found
        return self._alone(line, match)

    def _alone(self, line: Line, match: re.Match[str] | None) -> list[Fact]:
        """Read a line that is an error by its words. ``match`` splits it if an exception's class begins it."""
        text = line.text
        device = _DEVICE.match(text)
        if device is not None:
            line = replace(line, text=device["text"], who=replace(line.who, local_rank=int(device["local"])))
            text, match = line.text, _BARE.match(line.text)
        follows_last = self._last_error == (line.stream, line.number - 1)
        if text.rstrip().endswith("Last error:"):
            self._last_error = (line.stream, line.number)
        if _NO_ERROR.search(text):
            return []
        shape = text.translate(_NO_DIGITS)  # lines that differ in digits only are looked up once
        if shape not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes[shape] = find_known(text)
        known = self._shapes.get(shape)
        if match is None and known is None and device is None and not follows_last:
            return [ErrorLine(**origin_of(line))] if _ERROR_LEVEL.search(text) or _BEHIND.search(text) else []
        common = origin_of(line)
        if (follows_last or known is not None) and (cause := named_cause(text, common)) is not None:
            return [cause]
        if match is None and (known is None or known.nature == "note") and device is None:
            return [ErrorLine(**common)] if _ERROR_LEVEL.search(text) or _BEHIND.search(text) else []
        kind, message = (match["type"], match["message"] or "") if match is not None else ("", text)
        measured = kind.rpartition(".")[2] not in _BUILTIN and _MEASURED.match(message) is not None
        reading = classify(kind, message)
        if match is not None and kind.rpartition(".")[2] == "CalledProcessError":
            reading = replace(reading, nature=Nature.FOLLOWS)  # who called reports it, and not the command
        elif measured if known is None else known.nature == "note":
            return []
        raised = RaisedText(type=kind, lines=[message])
        facts = failure_facts(raised, (), reading, common)
        alone = match is None or reading.nature in {Nature.OWN, Nature.STOPPED}
        return [replace(fact, alone=alone) if isinstance(fact, Failed) else fact for fact in facts]


def _facts(block: _Open) -> list[Fact]:
    if block.harmless:
        return []
    if not block.text.chain[0].type:  # it is cut off before the line of its exception
        frames = [f"{frame.file}:{frame.line}" for frame in block.text.chain[-1].frames[-1:]]
        said = quote(": ".join(["a traceback that is cut off before its exception", *frames]))
        return [ErrorLine(**{**origin_of(block.header), "said": said})]
    time = time_of(block.said) or time_of(block.header)
    return traceback_facts(block.text, {"who": block.header.who, "spot": block.said.spot(), "time": time})


def traceback_facts(text: Traceback, common: dict[str, Any]) -> list[Fact]:
    """Return the facts of a whole traceback. ``common``: who, spot and time of the facts."""
    raised, frames = text.root()
    if raised.name in {"ProcessExitedException", "Exception"} and (ended := _EXITED.search(raised.message)) is not None:
        return [_child_ended(ended, common)]
    if raised.name == "CalledProcessError" and (died := _DIED.search(raised.message)) is not None:
        return [Exited(**{**common, "said": quote(raised.message)}, signal=died["signal"])]
    if text.process is not None:
        common = {**common, "who": replace(common["who"], local_rank=text.process)}
    reading = classify(raised.type, raised.message, frames)
    in_worker = any(classify(error.type, error.message).in_worker for error in text.chain if error.type)
    if raised.name == "CalledProcessError" and any(_LAUNCHERS.search(frame.file) for frame in frames):
        reading = replace(reading, nature=Nature.FOLLOWS)
    if reading.nature is Nature.OWN and raised.name.startswith("Rendezvous"):
        is_agents = any(_AGENT.search(frame.file) for frame in frames)
        reading = replace(reading, nature=Nature.PEER_LOST) if is_agents else reading
    return failure_facts(raised, frames, replace(reading, in_worker=in_worker), common)


def _child_ended(found: re.Match[str], common: dict[str, Any]) -> Exited:
    """Return the end of a process that mp.spawn started, by its number."""
    child = replace(common["who"], local_rank=int(found["process"]))
    code = int(found["code"]) if found["code"] else None
    return Exited(**{**common, "who": child, "said": quote(found[0])}, code=code, signal=found["signal"] or "")


def failure_facts(
    raised: RaisedText, frames: Sequence[Frame], reading: Reading, common: dict[str, Any]
) -> list[Fact]:  # fmt: skip
    """Return the failure, and the wait that ended with it. ``common``: who, spot and time of the facts."""
    said = quote(": ".join(filter(None, (raised.type, raised.message))))
    # The collective in whose function of torch it was raised
    functions = (frame.function for frame in reversed(frames) if _C10D.search(frame.file))
    operation = next((Operation(op=name) for name in functions if name in _OPERATIONS), None)
    who = common["who"]
    if who.rank is None and reading.known is not None and len(ranks := reading.known.ranks(said)) == 1:
        who = replace(who, rank=ranks[0])
    common = {**common, "who": who, "said": said}
    words = raised.message.partition("Last error:")[2].strip()  # NCCL's, at the end of an error of torch
    cause = named_cause(words, common)
    if cause is not None:
        reading = Reading(nature=Nature.FOLLOWS)
    message = f"{words} ({raised.message})" if words else raised.message
    failed = Failed(
        type=raised.name, message=quote(message), frames=tuple(frames), operation=operation,
        in_worker=reading.in_worker, **reading.fields, **common,
    )  # fmt: skip
    if reading.known is not None and reading.known.nature == "link":
        problem = f"{reading.known.shown.partition(';')[0]}: {reading.known.means}"
        cause = Link(problem=problem, fix=reading.known.fix, **common)
    if raised.name == "SignalException" and (got := _GOT.search(raised.message)) is not None:
        return [failed, Stopped(by=_SIGNALS.get(got["signal"], "signal"), **common)]
    limit = _LIMIT.search(raised.message)
    if limit is None or reading.nature is not Nature.TIMED_OUT:
        return [failed] if cause is None else [cause, failed]
    in_init = any(frame.function in _INIT for frame in frames)
    limit_s = int(limit["ms"]) / 1000
    waiting = Waiting(
        operation=operation or Operation(), timed_out=True, limit_s=limit_s, frames=tuple(frames), in_init=in_init,
        **common,
    )  # fmt: skip
    return [waiting, failed]
