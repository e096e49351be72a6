"""Launchers and trainers: a job's beginning, progress and end, as torchrun, Slurm, DeepSpeed and Horovod log them.

The texts of torchrun are those of torch/distributed/elastic, from torch 1.9 to 2.13. Each node prints a table of its
failures. ``@record`` leaves error files. Slurm's accounting, ``sacct``, shows how a job and its steps ended.
"""

from __future__ import annotations

import json
import re
from calendar import timegm
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.logs.errors import SIGNALS_BY_WORDS, classify, exited, numbers
from ddpdoctor.logs.lines import AGENTS, DocumentFormat, Found, LineReader, origin_of, quote
from ddpdoctor.logs.tracebacks import HEADER, RaisedText, failure_facts, read_traceback, traceback_facts
from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.facts import signal_name
from ddpdoctor.model.launch import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from ddpdoctor.logs.lines import Document, Line


class LaunchReader(LineReader):
    """Finds where a job begins."""

    name = "launcher"
    triggers = (b"OMP_NUM_THREADS", b"NCCL version", b"Initializing distributed", b"elastic_operator")

    def read(self, line: Line) -> Iterable[lf.Fact]:
        if not line.begins_job:
            return ()
        several = any(words in line.text for words in AGENTS)
        return (lf.Launched(**{**line.says(), "said": ""}, starts_several=several),)


MOST_STREAMS = 4096  # our choice: the progress of so many writers is kept
# Our choice: a job that logs this many steps after an error has handled it. It would stop if a rank were lost.
STEADY = 4
_PROGRESS = (
    re.compile(r"\biteration\s+(?P<step>\d+)\s*/\s*\d+ \|"),  # Megatron, NeMo
    re.compile(r"\b(?:global[_ ])?(?:[Ss]tep|STEP|[Ii]ter(?:ation)?)\s*[:=#]?\s*\[?(?P<step>\d+)\b(?!\.\d)"),
    re.compile(r"\d+%\|[^|]{0,200}\|\s*(?P<step>\d+)/\d+ \["),  # tqdm
    re.compile(r"\{'(?:loss|train_loss|eval_loss)': [^}]{0,400}'epoch': "),  # Hugging Face's Trainer
    re.compile(r"\b[Ee]poch\s*[:=#]?\s*\[?\d+\b"),
)
_DOES = (
    r"(?:pre-?)?(?:tokeniz|encod|process|download|extract|unpack|unzip|index|cach|pack|filter"
    r"|group|convert|prepar|scan|evaluat|validat|compil|sav|writ|serializ|upload|merg|shuffl|decod|resampl)ing\b"
)
_BUILDS = r"(?:build|creat|generat)ing .{0,40}?\b(?:index|indices|cache|data ?sets?|vocab\w*|split|examples)\b"
_BARS = r"tokenizer\b|map\b|flatten\w*|filter\b|fetching \d+ files|validation\b|evaluation\b|sanity check"
_BAR, _PERCENT = (
    re.compile(
        rf"(?P<task>(?:[^|%\r\n]{{0,80}}\W)?(?:{words})[^|%\r\n]{{0,80}}?)[\s:|]*"
        rf"\b(?P<share>\d{{1,3}})(?:\.\d{{1,3}})? ?{sign}",
        re.IGNORECASE,
    )
    for words, sign in ((f"{_DOES}|{_BUILDS}|{_BARS}", r"%\|"), (f"{_DOES}|{_BUILDS}", "%"))
)
# Lines such as "> building indices on rank 0 ..." or "saving checkpoint at step 40".
_BEGUN = re.compile(
    rf"^(?:.{{0,80}}[\]:|>-]\s{{1,4}}|\W{{0,4}})(?P<task>(?:\w{{1,12}}\W{{1,3}})?(?:{_DOES}|{_BUILDS})[^|%\r\n]{{0,80}}"
    r"|[^|%\r\n]{0,80}ing\b[^|%\r\n]{0,40} on rank 0\b[^|%\r\n]{0,40})",
    re.IGNORECASE,
)
_DONE = re.compile(
    r"\b(?:done|finish(?:ed)?|completed|complete$|saved|took|elapsed|succe\w{1,20}|loaded|written|built|cached|skip\w{0,4})\b",
    re.IGNORECASE,
)
# A line with none of these says nothing of such work: most lines need no other search.
_STEMS = (
    "tokeniz", "encod", "process", "load", "extract", "unpack", "unzip", "index", "indic", "cach", "pack", "filter",
    "group", "convert", "prepar", "scan", "evaluat", "valid", "compil", "saving", "writing", "serializ", "merg",
    "shuffl", "decod", "resampl", "building", "creating", "generating", "map", "flatten", "fetch", "sanity", "rank 0",
)  # fmt: skip
_MOST_HEAD = 240  # our choice: what a line says of work stands in its first characters
_FULL = 100
_MOST_TASK = 80
_WORDS = ("tep", "STEP", "ter", "%|", "poch", "loss'")
# A line with one of these may name a step for another reason.
_NOT_PROGRESS = re.compile(
    r"^#|rror|Unexpected result|\brerun\b|\b(?:nan|NaN) on rank|[Tt]imeout|timed out|Traceback"
    r"|xception|NCCL|WARN|StepId|\bFile \"|SeqNum|[Rr]esum|[Rr]estor"
    r"|[Ll]oad(?:ed|ing).{0,40}(?:from|[Cc]heckpoint)|from checkpoint|--\w|[Nn]um[_ ]|[Mm]ax[_ ]|[Cc]onfig"
)
_LOSS = re.compile(
    r"(?<![\w-])(?:[a-z]+[_ /])?[Ll]oss(?:es)?['\"]?\s{0,4}[:=]?\s{0,4}(?:tensor\()?"
    r"(?:(?P<bad>[-+]?(?:nan|inf|NaN|Inf|NAN|INF))\b|[-+]?\d)"
)
_ENDS = (
    re.compile(r"`?Trainer\.fit`? stopped: `?max_\w+="),  # Lightning
    re.compile(r"\bTraining completed\. Do not forget to share your model"),  # Hugging Face
    re.compile(r"\{'train_runtime': "),
    re.compile(r"\[after training is done\]|exiting program at iteration \d+"),  # Megatron
    re.compile(r"\b[Tt]raining (?:is |has )?(?:completed?|finished|done|ended)\b(?! *[:=])"),
)
_PROCESS_ENDS = "destroy_process_group() was not called before program exit"  # torch
_END_WORDS = ("raining", "Trainer.fit", "train_runtime", "exiting program")
_SPAWNED = re.compile(r"\[launch\.py:\d+:\w+\] process (?P<pid>\d+) spawned with command: (?P<command>.+)")
_EXITS = re.compile(r"\[launch\.py:\d+:\w+\] (?P<command>\[.{0,16000}\]) exits with return code = (?P<code>-?\d+)")
_NODES = re.compile(r"\] nnodes=(\d{1,6}), num_local_procs=")
_LOCAL_RANK = re.compile(r"--local[_-]rank[= ',]+(?P<local_rank>\d{1,4})\b")
_ONLY_LOCAL_RANK = re.compile(r"--local[_-]rank[= ',]+0\b")  # of several processes, the last one has another local rank
_TRACE = re.compile(r"Invalidate trace cache @ step (?P<step>\d+): expected module \d+, but got module \d+")
SIGNALS = {
    2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM",
}  # fmt: skip


@dataclass(slots=True)
class _Progress:
    line: Line
    step: int | None
    recent: list[tuple[object, int]] = field(default_factory=list)  # the last different steps, with their lines
    nonfinite: tuple[Line, int | None] | None = None  # the line and step since which each loss has been NaN or infinite
    nonfinite_count: int = 0

    def add(self, step: int | None, line: Line) -> None:
        self.line, self.step = line, step
        key = step if step is not None else line.text
        if (loss := _LOSS.search(line.text)) is not None:
            self.nonfinite = (self.nonfinite or (line, step)) if loss["bad"] else None
            self.nonfinite_count = self.nonfinite_count + 1 if loss["bad"] else 0
        if not self.recent or self.recent[-1][0] != key:
            self.recent = [*self.recent[1 - STEADY :], (key, line.number)]


@dataclass(slots=True, eq=False)
class FrameworkReader(LineReader):
    """Reads progress and ends. Only the latest progress of each writer is kept."""

    name = "trainer"
    triggers = (b"exits with return code", b"Invalidate trace cache")
    _several_nodes: bool | None = None
    _last: dict[tuple[Any, ...], _Progress] = field(default_factory=dict)
    _work: dict[tuple[Any, ...], lf.BusyRank] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        if line.begins_run:
            return self.end()
        self._note_work(line)
        if "[launch.py:" in text:
            return tuple(self._launcher(line))
        ends = any(words in text for words in _END_WORDS) and any(end.search(text) for end in _ENDS)
        if ends or _PROCESS_ENDS in text:
            return (lf.Finished(**line.says(), process_only=not ends),)
        if "Invalidate trace cache" in text and (found := _TRACE.search(text)) is not None:
            at = f"at step {found['step']}"
            words = f"ZeRO-3 saw modules in a different order than before {at}: do all ranks call the same modules?"
            return (lf.Hint(**line.says(), words=words, kind="zero3-order"),)
        if any(word in text for word in _WORDS):
            return self._progress(line)
        # A rank is there: its first plain line.
        rank = line.who.rank
        if rank is None or rank in self._seen or len(self._seen) >= MOST_STREAMS or not text.strip():
            return ()
        if _NOT_PROGRESS.search(text) is not None:
            return ()
        self._seen.add(rank)
        return (lf.Seen(who=line.who, spot=line.spot(), time=line.time),)

    def end(self) -> Iterable[lf.Fact]:
        found: list[lf.Fact] = []
        for progress in self._last.values():
            steady_from = progress.recent[0][1] if len(progress.recent) >= STEADY else None
            found.append(lf.Moving(**progress.line.says(), step=progress.step, logged=True, steady_from=steady_from))
        found += self._work.values()
        for progress in self._last.values():
            if progress.nonfinite is None or progress.nonfinite_count < STEADY:
                continue  # one bad step is not a fault: fp16 skips it
            line, step = progress.nonfinite
            since = f", since step {step} or earlier" if step is not None else ""
            found.append(lf.Trouble(
                **line.says(lf.Who()), kind="nonfinite",
                problem=f"the loss is NaN or infinite in the last {progress.nonfinite_count} logged steps{since}",
                fix="check the data, learning rate and precision of the steps before it; `ddpdoctor wrap "
                "--check-every 1` names the rank and the tensor that were first; if it is one rank, test its GPU",
            ))  # fmt: skip
        self._last.clear()
        self._work.clear()
        self._seen.clear()
        return found

    def _note_work(self, line: Line) -> None:
        """Keep a writer's last line about work without other ranks, until that work ends or the job continues."""
        text, former = line.text[:_MOST_HEAD], self._work.get(line.stream)
        names_work = ("ing" in text or "%|" in text) and any(stem in text.lower() for stem in _STEMS)
        if (former is None and not names_work) or (_NOT_PROGRESS.search(text) is not None and "%|" not in text):
            return
        bar = (_BAR if "%|" in text else _PERCENT).search(text) if names_work and "%" in text else None
        begun = None
        if names_work and bar is None and "ing" in text and _DONE.search(text) is None:
            begun = _BEGUN.search(text)
        share = int(bar["share"]) if bar is not None else None
        if (found := bar or begun) is not None and (share is None or share < _FULL):
            is_other = former is not None and share is not None and share < (former.share or 0)  # another rank's bar
            if not is_other and (former is not None or len(self._work) < MOST_STREAMS):
                task = " ".join(found["task"].split()).strip(" :-|>.")[:_MOST_TASK]
                self._work[line.stream] = lf.BusyRank(**line.says(), task=quote(task), share=share)
        elif former is not None and text.strip():
            is_step = any(pattern.search(text) for pattern in _PROGRESS)
            if former.share is None or is_step or _DONE.search(text) is not None or share == _FULL:
                del self._work[line.stream]

    def _progress(self, line: Line) -> Iterable[lf.Fact]:
        """Take in a line about progress. If its step has fallen, a new run may have begun."""
        if line.stream not in self._last and len(self._last) >= MOST_STREAMS:
            return ()
        found = next((match for pattern in _PROGRESS if (match := pattern.search(line.text)) is not None), None)
        if found is None or _NOT_PROGRESS.search(line.text):
            return ()
        digits = found.groupdict().get("step")
        step = int(digits) if digits is not None and len(digits) < 12 else None
        former = self._last.get(line.stream)
        has_fallen = former is not None and (former.step or 0) > 2 * (step or 0) and step is not None
        facts = (*self.end(), lf.Launched(who=line.who, spot=line.spot(), by_step=True)) if has_fallen else ()
        self._last.setdefault(line.stream, _Progress(line, step)).add(step, line)
        return facts

    def _launcher(self, line: Line) -> Iterator[lf.Fact]:
        if (nodes := _NODES.search(line.text)) is not None:
            self._several_nodes = int(nodes[1]) > 1
        elif (found := _SPAWNED.search(line.text)) is not None:
            yield lf.Seen(who=self._who(line, found["command"], int(found["pid"])), spot=line.spot(), time=line.time)
        elif (found := _EXITS.search(line.text)) is not None and (code := int(found["code"])):
            number = -code if code < 0 else code - 128
            signal = SIGNALS.get(number, "")
            # The launcher prints the command of the process that it started last, whichever failed.
            is_only = _ONLY_LOCAL_RANK.search(found["command"]) is not None
            who = self._who(line, found["command"]) if is_only else lf.Who(host=line.who.host)
            said = {**line.says(who), "said": f"a DeepSpeed launcher process exited with return code {code}"}
            yield lf.Exited(signal=signal, code=None if signal else code, by_launcher=signal == "SIGTERM", **said)

    def _who(self, line: Line, command: str, pid: int | None = None) -> lf.Who:
        """Return a process that the launcher started. If the log shows one node, the local rank is the rank."""
        found = _LOCAL_RANK.search(command)
        local_rank = int(found["local_rank"]) if found is not None else None
        rank = local_rank if self._several_nodes is False and not line.who.host else None
        return lf.Who(rank=rank, host=line.who.host, pid=pid, local_rank=local_rank)


_MOST_STALLED = 4096
_STALLED_HEADS = ("Missing ranks:", "Stalled ranks:")
# What follows: "2: [allreduce.grad_1, allreduce.grad_2 ...]".
_STALLED_RANK = re.compile(r"(?:^|[\s>:])(?P<rank>\d{1,7}): ?\[(?P<names>[^\]]{1,2000})")
_MISSING_RANKS = re.compile(r"(?P<name>\S{1,200}) \[missing ranks: ?(?P<ranks>[\d, ]{1,2000})\]")


@dataclass(slots=True, eq=False)
class HorovodReader(LineReader):
    """Finds the ranks that the others wait for."""

    name = "Horovod"
    triggers = (b"Missing ranks:", b"Stalled ranks:", b"[missing ranks:")
    begins = ("ranks:",)
    _open: bool = False

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        if "ranks:" in text:
            self._open = text.strip() in _STALLED_HEADS
            old = _MISSING_RANKS.finditer(text) if "[missing ranks:" in text else ()
            stalled = [(rank, match["name"]) for match in old for rank in numbers(match["ranks"])[:_MOST_STALLED]]
        elif not self._open:
            return ()
        else:
            # The rank looks like the label of Slurm's tasks, which is off the text by now.
            found = _STALLED_RANK.search(f"{line.raw_prefix}{text}")
            self._open = found is not None
            stalled = [] if found is None else [(int(found["rank"]), found["names"].partition(",")[0])]
        return [
            lf.Absent(
                **{**line.says(lf.Who(rank=rank)), "said": quote(f"{line.raw_prefix}{text}")},
                operation=lf.Operation(op=quote(tensor).removesuffix(" ...")), certain=False, expected=True,
            )
            for rank, tensor in stalled
        ]  # fmt: skip


_MOST_MESSAGE_LINES = 400
_MOST_TABLES = 4096
_TORCHRUN_GATE = ("elastic", "exitcode", "Failures:", "Root Cause")
# How the lines of a process in a table begin, after two blanks or, if all lines of a paste have them, none.
_TABLE_FIELDS = frozenset({"time", "host", "rank", "exit"})
_BLOCK = re.compile(r"^\s*\[(\d{1,7})\]:\s*$")
_TABLE_FIELD = re.compile(r"^\s*(?P<name>time|host|rank|exitcode|error_file|traceback|msg) {0,10}: ?(?P<value>.*)$")
_TABLE_RANK = re.compile(r"(?P<rank>\d{1,9}) \(local_rank: (?P<local>\d{1,9})\)")
_TABLE_CODE = re.compile(r"(?P<code>-?\d{1,9}) \(pid: (?P<pid>\d{1,9})\)")
_SECONDS = re.compile(r"(\d{4})-(\d\d)-(\d\d)[_T](\d\d):(\d\d):(\d\d)")
_FAILED = re.compile(
    r"failed \(exitcode: (?P<code>-?\d{1,9})\) local_rank: (?P<local>\d{1,9}) \(pid: (?P<pid>\d{1,9})\)"
)
_CLOSING = re.compile(
    r"(?:Sending process|Closing process|Unable to shutdown process) (?P<pid>\d{1,9})"
    r" (?:closing signal|via signal|via .{1,40}?, forcefully exiting via) (?:Signals\.)?(?P<signal>SIG\w+)"
)
_DEATH = re.compile(r"Received (?:Signals\.)?(?P<signal>SIG\w+|\d{1,2}) death signal")
_RESTARTS = re.compile(r"(?P<left>\d{1,6})/(?P<most>\d{1,6}) attempts left;\s+will restart worker group")
# What stands in place of a traceback.
_NOTHING = ("To enable traceback see", "Signal ", "Process failed with exitcode", "<N/A>", "<NONE>")
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,120}): (?P<message>.*)", re.DOTALL)


@dataclass(slots=True)
class _Block:
    line: Line
    root: bool
    fields: dict[str, str] = field(default_factory=dict)
    message: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Table:
    root: bool = False
    block: _Block | None = None


@dataclass(slots=True, eq=False)
class TorchrunReader(LineReader):
    """Finds what torchrun's agent reports about its ranks."""

    name = "torchrun"
    triggers = (b"elastic", b"xitcode", b"rror")
    _tables: dict[Hashable, _Table] = field(default_factory=dict)

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        table = self._tables.get(line.stream)
        if table is not None:
            return self._read_table(line, table)
        if (text[2:6] in _TABLE_FIELDS or text[:4] in _TABLE_FIELDS) and _TABLE_FIELD.match(text) is not None:
            # The table of a paste that begins in its middle
            return self._read_table(line, self._open(line, _Table(block=_Block(line, root=False))))
        if not any(words in text for words in _TORCHRUN_GATE):
            return ()
        facts, title = _read_agent(line), text.strip().rstrip(":")
        if not facts and title in {"Failures", "Root Cause", "Root Cause (first observed failure)"}:
            self._open(line, _Table(root=title.startswith("Root Cause")))
        return facts

    def end(self) -> Iterable[lf.Fact]:
        found = [fact for table in self._tables.values() for fact in _block_facts(table.block)]
        self._tables.clear()
        return found

    def _open(self, line: Line, table: _Table) -> _Table:
        if len(self._tables) >= _MOST_TABLES:
            self._tables.clear()
        self._tables[line.stream] = table
        return table

    def _read_table(self, line: Line, table: _Table) -> list[lf.Fact]:
        text, block, stripped = line.text, table.block, line.text.strip()
        if _BLOCK.match(text) is not None:
            table.block = _Block(line, table.root)
            return _block_facts(block)
        if stripped.startswith(("Root Cause", "Failures:", "Other Failures")):
            table.root, table.block = stripped.startswith("Root Cause"), None
            return _block_facts(block)
        if block is not None and self._take(block, text):
            return []
        if not stripped or stripped.startswith(("---", "<NO_OTHER")):
            table.block = None
            return _block_facts(block)
        # A table ends at its last border; torch before 1.11 has the root cause first, and a border after it.
        if stripped.startswith(("===", "***")) and (block is None or not table.root or block.fields):
            del self._tables[line.stream]
            return _block_facts(block)
        return _read_agent(line)

    def _take(self, block: _Block, text: str) -> bool:
        if block.message:
            goes_on = len(block.message) < _MOST_MESSAGE_LINES and (text.startswith("  ") or not text)
            block.message += [text.removeprefix("  ")] if goes_on else []
            return goes_on
        match = _TABLE_FIELD.match(text)
        if match is None:
            return False
        if match["name"] in {"traceback", "msg"}:
            block.message.append(match["value"])
        else:
            block.fields[match["name"]] = match["value"].strip()
        return True


def _read_agent(line: Line) -> list[lf.Fact]:
    text = line.text
    if (failed := _FAILED.search(text)) is not None:
        who = replace(line.who, local_rank=int(failed["local"]), pid=int(failed["pid"]))
        return [exited(int(failed["code"]), first=True, **origin_of(line, who))]
    if (stopped := _CLOSING.search(text)) is not None:
        who = replace(line.who, pid=int(stopped["pid"]))
        return [lf.Exited(signal=stopped["signal"], by_launcher=True, **origin_of(line, who))]
    common = origin_of(line)  # What concerns all ranks of a node
    if (death := _DEATH.search(text)) is not None:
        signal = death["signal"]
        name = signal_name(int(signal)) if signal.isdigit() else signal
        return [lf.Stopped(by=name if name in {"SIGHUP", "SIGINT"} else "signal", **common)]
    if (restarts := _RESTARTS.search(text)) is not None:
        return [lf.Restarted(attempt=int(restarts["most"]) - int(restarts["left"]) + 1, **common)]
    if "new nodes from group_rank" in text and "will restart worker group" in text:
        return [lf.Restarted(**common)]
    return [lf.Finished(**common)] if "worker group successfully finished" in text else []


def _block_facts(block: _Block | None) -> list[lf.Fact]:
    if block is None:
        return []
    code = _TABLE_CODE.search(block.fields.get("exitcode", ""))
    rank = _TABLE_RANK.search(block.fields.get("rank", ""))
    named = block.fields.get("host", "")
    host = named if named and not named.startswith("localhost") else block.line.who.host
    who = replace(block.line.who, host=host, pid=int(code["pid"]) if code is not None else None)
    if rank is not None and int(rank["rank"]) < lf.MOST_RANKS:
        who = replace(who, rank=int(rank["rank"]), local_rank=int(rank["local"]))
    time = _time_of(block.fields.get("time", ""), host or block.line.source)
    common: dict[str, Any] = {"who": who, "spot": block.line.spot(), "time": time}
    if code is None:  # the table was cut off before the exit status: a rank failed, and how is not told
        if who.rank is None or not {"host", "time"} <= block.fields.keys():
            return []
        first = " first on its node" if block.root else ""
        message = f"torchrun's table shows that rank {who.rank} failed{first}, but is cut off before the exit status"
        return [lf.Failed(type="ChildFailedError", message=message, nature=lf.Nature.FOLLOWS, said=message, **common)]
    exit_code = int(code["code"])
    said = quote(f"rank {who.rank} (local_rank: {who.local_rank}) exitcode: {block.fields['exitcode']}")
    by_launcher = exit_code == -15 and not block.root
    ended = exited(exit_code, first=block.root, by_launcher=by_launcher, said=said, **common)
    return [*_message_facts("\n".join(block.message), common), ended]


def _message_facts(message: str, common: dict[str, Any]) -> list[lf.Fact]:
    """Return the facts of a traceback or message that torchrun took from an error file."""
    if HEADER in message and (text := read_traceback(message.splitlines())) is not None:
        return traceback_facts(text, common)
    match = _RAISED.match(message.strip())
    if match is None or message.strip().startswith(_NOTHING):
        return []
    raised = RaisedText(type=match["type"], lines=match["message"].splitlines() or [""])
    return failure_facts(raised, (), classify(raised.type, raised.message), common)


def _time_of(text: str, clock: str) -> lf.Time | None:
    """Return the time in a text: whole seconds, in the zone of the node."""
    match = _SECONDS.search(text)
    try:
        return lf.Time(seconds=timegm((*map(int, match.groups()), 0, 0, 0)), clock=clock) if match is not None else None
    except ValueError:
        return None


def _is_error_file(head: bytes) -> bool:
    """Return whether a file begins as an error file does: JSON lines of a log have a message too."""
    if not re.match(rb'\{\s*"(?:message|errorCode)"\s*:', head.lstrip()[:64]):
        return False
    if b'"py_callstack"' in head or b'"extraInfo"' in head:
        return b'}\n{"' not in head
    content = _parsed_json(head)
    return isinstance(content, dict) and content.keys() <= {"message", "errorCode", "timestamp"}


def _read_error_file(document: Document) -> Found:
    content = _parsed_json(document.body)
    said = content.get("message") if isinstance(content, dict) else None
    if said is None:
        return Found(problem="cut off" if document.cut or content is None else "not a torchrun error file")
    extra = said.get("extraInfo") if isinstance(said, dict) else None
    extra = extra if isinstance(extra, dict) else {}
    # The files of one attempt are those of one agent, and thus of one host.
    attempt = document.source.rpartition("/")[0].rpartition("/")[0] or document.source
    clock = f"{document.who.host or attempt}, epoch"
    digits = str(extra.get("timestamp"))
    time = lf.Time(seconds=int(digits), clock=clock) if digits.isdigit() and len(digits) < 12 else None
    short = said.get("message", "") if isinstance(said, dict) else said
    callstack = extra.get("py_callstack", "")
    message = callstack if isinstance(callstack, str) and HEADER in callstack else short
    common = {"who": document.who, "spot": lf.Spot(source=document.source), "time": time}
    return Found(facts=_message_facts(str(message), common), lines=document.body.count(b"\n") + 1)


# The ``error.json`` that ``@record`` writes for a rank.
ERROR_FILE = DocumentFormat("torchrun error file", _is_error_file, _read_error_file)


def _parsed_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


MOST_TASKS = 65_536
MEMORY_FIX = "ask for more memory (sbatch --mem or --mem-per-cpu), or use less: fewer loader workers, smaller batches"
_SRUN_TASKS = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>Out Of Memory|Terminated|Killed|Aborted|"
    r"Segmentation fault|Bus error|Floating point exception|Illegal instruction|Interrupt|Hangup|Quit|"
    r"Exited with exit code (?P<code>\d+))"
)
_OOM_EVENT = re.compile(r"Detected (?P<count>\d+) oom[-_]kill events?(?:\(s\))? in (?P<step>(?:StepId=|step )[\w.+]+)")
_OOM_LIMIT = re.compile(
    r"(?:[Ss]tep|[Jj]ob|StepId=)\s?[\w.]+ (?:task \d+ )?exceeded (?:\w+ )?memory limit"
    r"|Exceeded (?:job|step) memory limit"
)
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) (?P<id>[\w.+]+) ON (?P<host>[\w.-]+) CANCELLED AT (?P<time>[\dT:-]+)"
    r"(?: DUE TO (?P<why>[A-Z _]+))?"
)
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (?P<hosts>[\w.,\[\]-]+)")
_STEP_ENDS = ("Job step aborted", "CANCELLED AT", "Terminating StepId", "First task exited", "Sent SIGKILL")
_STOPPED = {
    "TIME LIMIT": "time limit", "PREEMPTION": "preemption", "JOB REQUEUE": "requeue", "TIME_LIMIT": "time limit",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class SlurmReader(LineReader):
    """Reads the lines of srun and slurmstepd."""

    name = "Slurm"
    triggers = (b"slurmstepd: ", b"srun: error", b"Job step aborted", b"First task exited")
    begins = ("srun: ", "slurmstepd")
    _stopping: bool = False  # Whether Slurm is ending the step. It then also ends the remaining tasks.

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        if not any(words in text for words in self.begins):
            self._stopping = self._stopping and not line.begins_run
            return ()
        facts = list(self._facts(line))
        self._stopping = self._stopping or any(words in text for words in _STEP_ENDS)
        return facts

    def _facts(self, line: Line) -> Iterator[lf.Fact]:
        text = line.text
        if (found := _SRUN_TASKS.search(text)) is not None:
            yield from self._tasks(found, line)
        elif _OOM_EVENT.search(text) or _OOM_LIMIT.search(text):
            found = _OOM_EVENT.search(text)
            where = f" in {found['step'].removeprefix('StepId=').removeprefix('step ')}" if found is not None else ""
            problem = f"Slurm's memory limit was reached{where}, and the kernel killed a process"
            who = lf.Who(host=line.who.host, address=line.who.address)
            yield lf.Trouble(kind="oom", problem=problem, fix=MEMORY_FIX, **line.says(who))
        elif (found := _CANCELLED.search(text)) is not None:
            why, said = (found["why"] or "").strip(), line.says(lf.Who())
            said["time"] = line.time or _time_of(found["time"], found["host"])
            if "NODE FAIL" in why:  # the host in the line runs the step's script: it is not the one that failed
                problem = "Slurm ended the job because a node failed, but does not name it here"
                fix = f"sacct -j {found['id'].partition('.')[0]} -o JobID,State,NodeList; {NODE_FIX}"
                yield lf.Trouble(kind="node-failure", problem=problem, fix=fix, **said)
            else:
                by = next((words for text, words in _STOPPED.items() if text in why), "cancelled")
                yield lf.Stopped(by=by, **said)
        elif (found := _NODE_FAILURE.search(text)) is not None:
            try:
                hosts = expand_hosts(found["hosts"].rstrip(",."))
            except ValueError:
                hosts = (found["hosts"],)
            for host in hosts:
                said = line.says(lf.Who(host=host))
                yield lf.Trouble(kind="node-failure", problem="Slurm lost the node", fix=NODE_FIX, **said)

    def _tasks(self, found: re.Match[str], line: Line) -> Iterator[lf.Fact]:
        """Yield the end of each task. A task that a signal ends while Slurm ends the step is not at fault."""
        how, code = found["how"], int(found["code"]) if found["code"] else None
        signal = SIGNALS_BY_WORDS.get(how, "")
        if code is not None and code > 128 and code - 128 in SIGNALS:
            signal, code = SIGNALS[code - 128], None
        if code == 0:
            return
        told = signal == "SIGTERM" or (signal == "SIGKILL" and self._stopping and how != "Out Of Memory")
        for task in _task_numbers(found["tasks"]):
            said = line.says(lf.Who(host=found["host"], task=task))
            yield lf.Exited(code=code, signal=signal, by_launcher=told, memory=how == "Out Of Memory", **said)


NODE_FIX = "sinfo -R and scontrol show node give the reason; exclude the node (sbatch --exclude) and start again"


def _task_numbers(text: str) -> Iterator[int]:
    """Yield the numbers of "0-3,7" or "[0-3,7]"."""
    left = MOST_TASKS
    for part in text.strip("[]").split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(part) > 20:
            continue
        for number in range(int(first), min(int(last or first), int(first) + left) + 1):
            yield number
            left -= 1


_SACCT_HEAD = re.compile(r"^\s*JobID(?:Raw)?\b.*\bState\b")
_STOPPED_STATES = {"TIMEOUT": "time limit", "PREEMPTED": "preemption", "REQUEUED": "requeue", "DEADLINE": "time limit"}


@dataclass(slots=True, eq=False)
class SacctReader(LineReader):
    """Reads the tables of ``sacct``."""

    name = "sacct"
    triggers = (b"ExitCode",)
    begins = ("JobID",)
    _names: list[str] = field(default_factory=list)
    _places: list[tuple[int, int]] = field(default_factory=list)  # where the columns are, in a table without "|"
    _reported: set[tuple[str, str]] = field(default_factory=set)

    def read(self, line: Line) -> Iterable[lf.Fact]:
        if not self._names and "JobID" not in line.text:
            return ()
        text = line.raw_prefix + line.text  # the number of a job looks like a label
        if _SACCT_HEAD.match(text):
            self._names, self._places, self._reported = re.findall(r"[A-Za-z]+", text), [], set()
            return ()
        if not self._names:
            return ()
        if set(text.strip()) == {"-", " "}:
            self._places = [(found.start(), found.end()) for found in re.finditer("-+", text)]
            return ()
        values = text.split("|") if "|" in text else [text[start:end] for start, end in self._places]
        fields = dict(zip(self._names, (value.strip() for value in values), strict=False))
        fields["JobID"] = fields.get("JobID") or fields.get("JobIDRaw") or ""
        if not fields["JobID"][:1].isdigit():
            self._names = []
            return ()
        job, dot, _ = fields["JobID"].partition(".")
        common = {"spot": line.spot(), "said": quote(" ".join(text.split()))}
        fact = _sacct_fact(job, fields.get("State", ""), fields.get("ExitCode", ""), common)
        key = (job, type(fact).__name__)
        # A step may end well in a job that does not.
        if fact is None or key in self._reported or (dot and isinstance(fact, lf.Finished)):
            return ()
        self._reported.add(key)
        return (fact,)


def _sacct_fact(job: str, state: str, code: str, common: dict[str, Any]) -> lf.Fact | None:
    """Return the status and signal that a state and an exit code such as "0:15" stand for."""
    stopped = next((words for name, words in _STOPPED_STATES.items() if state.startswith(name)), "")
    digits = code.partition(":")[2]
    signal = SIGNALS.get(int(digits), "") if digits.isdigit() and len(digits) < 4 else ""
    if state.startswith("OUT_OF_ME"):
        problem = f"Slurm reports that job {job} ran out of memory"
        return lf.Trouble(kind="oom", problem=problem, fix=MEMORY_FIX, **common)
    if state.startswith("NODE_FAIL"):
        problem = f"Slurm reports that a node of job {job} failed, but not which one"
        return lf.Trouble(kind="node-failure", problem=problem, fix=NODE_FIX, **common)
    if stopped:
        return lf.Stopped(by=stopped, **common)
    if state.startswith("CANCELLED") or signal == "SIGTERM":
        return lf.Stopped(by="signal" if state.startswith("FAILED") else "cancelled", **common)
    if state.startswith("FAILED") and signal:
        return lf.Exited(who=lf.Who(), signal=signal, **common)
    return lf.Finished(**common) if state == "COMPLETED" and code.startswith("0:0") else None
