"""Launchers and trainers: where a job begins, its progress and its end, who is late, and what launchers lost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.errors import numbers
from ddpdoctor.evidence.reader import LineReader, quote
from ddpdoctor.model.evidence import (
    Absent,
    BusyRank,
    Exited,
    Finished,
    Hint,
    Launched,
    Moving,
    Operation,
    Seen,
    Trouble,
    Who,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

_AGENTS = (
    "Setting OMP_NUM_THREADS environment variable for each process",  # torchrun
    "Starting elastic_operator with launch configs",  # torchrun
)
_BEGINNINGS = (*_AGENTS, "Initializing distributed: GLOBAL_RANK: 0")  # the last one is Lightning's
_RAS = " compiled with CUDA"  # each report of NCCL's RAS begins with the version as well, and no job begins there
_NCCL = "NCCL version "  # NCCL's first line in a job begins with it. Errors of NCCL have it in their middle.
_RESTART = "will restart worker group"  # torchrun


def begins_run(text: str) -> bool:
    """Return whether the ranks are started with this line, for the first time or again.

    What a reader has held back belongs before it.
    """
    return _RESTART in text or _begins(text)


def _begins(text: str) -> bool:
    if _NCCL in text and _RAS not in text and (text.startswith(_NCCL) or f"NCCL INFO {_NCCL}" in text):
        return True
    return any(words in text for words in _BEGINNINGS)


class LaunchReader(LineReader):
    """Finds where a job begins."""

    name = "launcher"
    triggers = (b"OMP_NUM_THREADS", b"NCCL version", b"Initializing distributed", b"elastic_operator")

    def read(self, line: Line) -> Iterable[Fact]:
        """Return a fact if a launcher begins with this line."""
        if _begins(line.text):
            several = any(words in line.text for words in _AGENTS)
            return (Launched(who=line.who, spot=line.spot(), time=line.time, starts_several=several),)
        return ()


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
    """The progress of one writer."""

    line: Line
    step: int | None = None
    recent: list[tuple[object, int]] = field(default_factory=list)  # the last different steps, with their lines
    nonfinite: tuple[Line, int | None] | None = None  # the line and step since which each loss has been NaN or infinite
    nonfinite_count: int = 0

    def add(self, step: int | None, line: Line) -> None:
        """Take in the next line about progress."""
        self.line, self.step = line, step
        key = step if step is not None else line.text
        if (loss := _LOSS.search(line.text)) is not None:
            self.nonfinite = (self.nonfinite or (line, step)) if loss["bad"] else None
            self.nonfinite_count = self.nonfinite_count + 1 if loss["bad"] else 0
        if not self.recent or self.recent[-1][0] != key:
            self.recent = [*self.recent[1 - STEADY :], (key, line.number)]


def _nonfinite(progress: _Progress) -> Trouble | None:
    """Return that the loss is no number anymore. One bad step is not a fault: fp16 skips it."""
    if progress.nonfinite is None or progress.nonfinite_count < STEADY:
        return None
    line, step = progress.nonfinite
    since = f", at the latest from step {step} on" if step is not None else ""
    return Trouble(
        who=Who(), spot=line.spot(), time=line.time, said=quote(line.text), kind="nonfinite",
        problem=f"the loss is NaN or infinite in the last {progress.nonfinite_count} logged steps{since}",
        fix="look at the data, learning rate and precision of the steps before it; `ddpdoctor wrap --check-every 1` "
        "names the rank and the tensor that were first; if it is one rank, test its GPU",
    )  # fmt: skip


class FrameworkReader:
    """Reads progress and ends. Only the latest progress of each writer is kept."""

    name = "trainer"
    triggers = (b"exits with return code", b"Invalidate trace cache")

    def __init__(self) -> None:
        self._several_nodes: bool | None = None
        self._last: dict[tuple[Any, ...], _Progress] = {}
        self._work: dict[tuple[Any, ...], BusyRank] = {}
        self._seen: set[int] = set()

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts of one line."""
        text = line.text
        if begins_run(text):
            return tuple(self.end())
        self._note_work(line)
        if "[launch.py:" in text:
            return tuple(self._launcher(line))
        if any(words in text for words in _END_WORDS) and any(end.search(text) for end in _ENDS):
            return (Finished(who=line.who, spot=line.spot(), time=line.time, said=quote(text)),)
        if _PROCESS_ENDS in text:
            return (Finished(who=line.who, spot=line.spot(), time=line.time, said=quote(text), process_only=True),)
        if "Invalidate trace cache" in text and (found := _TRACE.search(text)) is not None:
            words = (
                f"ZeRO-3 saw modules in another order than before at step {found['step']}: do all ranks call the same?"
            )
            return (Hint(who=line.who, spot=line.spot(), said=quote(text), words=words, kind="zero3-order"),)
        if any(word in text for word in _WORDS):
            return self._progress(line)
        # A rank is there: its first plain line.
        rank = line.who.rank
        if rank is None or rank in self._seen or len(self._seen) >= MOST_STREAMS or not text.strip():
            return ()
        if _NOT_PROGRESS.search(text) is not None:
            return ()
        self._seen.add(rank)
        return (Seen(who=line.who, spot=line.spot(), time=line.time),)

    def end(self) -> Iterable[Fact]:
        """Return the last progress of each writer."""
        facts = [
            Moving(
                who=one.line.who, spot=one.line.spot(), time=one.line.time, said=quote(one.line.text), step=one.step,
                logged=True, steady_from=one.recent[0][1] if len(one.recent) >= STEADY else None,
            )
            for one in self._last.values()
        ]  # fmt: skip
        found = [*facts, *self._work.values(), *filter(None, map(_nonfinite, self._last.values()))]
        self._last.clear()
        self._work.clear()
        self._seen.clear()
        return found

    def _note_work(self, line: Line) -> None:
        """Keep what a writer says last of work that needs no other rank, until it says that it ended, or goes on."""
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
                self._work[line.stream] = BusyRank(
                    who=line.who, spot=line.spot(), time=line.time, said=quote(text), task=quote(task), share=share
                )
        elif former is not None and text.strip():
            is_step = any(pattern.search(text) for pattern in _PROGRESS)
            if former.share is None or is_step or _DONE.search(text) is not None or share == _FULL:
                del self._work[line.stream]

    def _progress(self, line: Line) -> Iterable[Fact]:
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
        facts = (*self.end(), Launched(who=line.who, spot=line.spot(), by_step=True)) if has_fallen else ()
        self._last.setdefault(line.stream, _Progress(line)).add(step, line)
        return facts

    def _launcher(self, line: Line) -> Iterator[Fact]:
        """Read DeepSpeed's launcher, which names the processes that it starts, and that one of them failed."""
        if (nodes := _NODES.search(line.text)) is not None:
            self._several_nodes = int(nodes[1]) > 1
        elif (found := _SPAWNED.search(line.text)) is not None:
            yield Seen(who=self._who(line, found["command"], int(found["pid"])), spot=line.spot(), time=line.time)
        elif (found := _EXITS.search(line.text)) is not None and (code := int(found["code"])):
            number = -code if code < 0 else code - 128
            signal = SIGNALS.get(number, "")
            # The launcher prints the command of the process that it started last, whichever failed.
            who = (
                self._who(line, found["command"])
                if _ONLY_LOCAL_RANK.search(found["command"])
                else Who(host=line.who.host)
            )
            words = f"a process of DeepSpeed's launcher exits with return code {code}"
            yield Exited(
                who=who, spot=line.spot(), time=line.time, said=words, signal=signal, code=None if signal else code,
                by_launcher=signal == "SIGTERM",
            )  # fmt: skip

    def _who(self, line: Line, command: str, pid: int | None = None) -> Who:
        """Return a process that the launcher started. If the log shows one node, the local rank is the rank."""
        found = _LOCAL_RANK.search(command)
        local_rank = int(found["local_rank"]) if found is not None else None
        rank = local_rank if self._several_nodes is False and not line.who.host else None
        return Who(rank=rank, host=line.who.host, pid=pid, local_rank=local_rank)


MOST_RANKS = 4096
_HEADS = ("Missing ranks:", "Stalled ranks:")
# What follows: "2: [allreduce.grad_1, allreduce.grad_2 ...]".
_RANK = re.compile(r"(?:^|[\s>:])(?P<rank>\d{1,7}): ?\[(?P<names>[^\]]{1,2000})")
_OLD = re.compile(r"(?P<name>\S{1,200}) \[missing ranks: ?(?P<ranks>[\d, ]{1,2000})\]")


class HorovodReader(LineReader):
    """Finds the ranks that the others wait for."""

    name = "Horovod"
    triggers = (b"Missing ranks:", b"Stalled ranks:", b"[missing ranks:")

    def __init__(self) -> None:
        self._open = False

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts of one line."""
        text = line.text
        if "ranks:" in text:
            self._open = text.strip() in _HEADS
            old = _OLD.finditer(text) if "[missing ranks:" in text else ()
            return [_absent(rank, one["name"], line) for one in old for rank in numbers(one["ranks"])[:MOST_RANKS]]
        if not self._open:
            return ()
        # The rank looks like the label of Slurm's tasks, which is off the text by now.
        found = _RANK.search(f"{line.raw_prefix}{text}")
        self._open = found is not None
        return () if found is None else (_absent(int(found["rank"]), found["names"].partition(",")[0], line),)


def _absent(rank: int, tensor: str, line: Line) -> Absent:
    operation = Operation(op=quote(tensor).removesuffix(" ..."))
    return Absent(
        who=Who(rank=rank), spot=line.spot(), time=line.time, said=quote(f"{line.raw_prefix}{line.text}"),
        operation=operation, certain=False, expected=True,
    )  # fmt: skip
