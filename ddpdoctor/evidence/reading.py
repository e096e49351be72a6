"""Reads all evidence in one pass with bounded memory, and sorts the facts by runs of the job."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpdoctor.evidence.files import HEAD_BYTES, MOST_UNPACKED, find_files, is_text, open_file, read_rest
from ddpdoctor.evidence.funnel import Funnel
from ddpdoctor.evidence.lines import LogSplitter
from ddpdoctor.evidence.nccl_log import NCCL_INFO, is_nccl_info, is_read_info
from ddpdoctor.evidence.reader import Document
from ddpdoctor.evidence.registry import document_readers, line_readers
from ddpdoctor.evidence.runs import Part, gather_runs
from ddpdoctor.model.attached import AttachedJob
from ddpdoctor.model.evidence import (
    Exited,
    Failed,
    Finished,
    Launched,
    Moving,
    Reached,
    Restarted,
    Stacked,
    Stopped,
    Waiting,
)
from ddpdoctor.model.evidence_runs import Evidence, Read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpdoctor.evidence.files import EvidenceFile, FileContent
    from ddpdoctor.evidence.reader import DocumentReader, LineReader
    from ddpdoctor.model.evidence import Fact

BLOCK_BYTES = 64 * 2**10
"""A log is searched for triggers in blocks of this size. A block without any is only counted."""
MANY_FILES = 64
"""Our choice: with fewer files, starting processes takes longer than they save."""
MOST_PROCESSES = 32
MOST_ALIKE = 16
"""Our choice: so many facts of one kind about one process that differ in numbers only are kept."""
_MOST_NAMES = 64
_JOB_NAMES = re.compile(
    r"\b(SLURM_JOB_?ID|PBS_JOBID|LSB_JOBID|MASTER_PORT|master[_-]port|rdzv[_-]id|run_id(?= {5}))\b"
    r"[\"']?\s{0,20}[=: ]\s{0,20}[\"']?([\w.-]{1,80})"
)
"""How a job calls itself in its log. "run_id" is torchrun's, in a column: trackers write one for each rank."""
_SAME_NAME = {"SLURM_JOBID": "SLURM_JOB_ID", "RDZV_ID": "RUN_ID"}
_DIGITS = re.compile(r"\d+")


@dataclass(slots=True)
class _Keeper:
    """Keeps the facts of one stream of lines, but not endless repetitions."""

    facts: list[Fact] = field(default_factory=list)
    counts: Counter[object] = field(default_factory=Counter)
    formats: dict[str, None] = field(default_factory=dict)
    ended: bool = False
    """Whether the processes of a run have ended."""

    def keep(self, name: str, facts: Iterable[Fact]) -> None:
        """Add what a reader of this name found."""
        for fact in facts:
            if isinstance(fact, Launched) and fact.by_step and not self.ended:
                continue
            self.formats[name] = None
            self.ended = self.ended or _ends(fact)
            if isinstance(fact, Launched | Restarted):
                self.counts.clear()
                self.ended = False
            key = (type(fact), fact.who, _DIGITS.sub("", fact.said))
            self.counts[key] += 1
            if self.counts[key] <= MOST_ALIKE:
                self.facts.append(fact)
            elif isinstance(fact, Moving | Reached):
                self._replace_last(fact, key)

    def _replace_last(self, fact: Fact, key: tuple[object, ...]) -> None:
        """Replace the previous progress by the newest."""
        for at in range(len(self.facts) - 1, -1, -1):
            former = self.facts[at]
            if (type(former), former.who, _DIGITS.sub("", former.said)) == key:
                self.facts[at] = fact
                return


def read_evidence(paths: Sequence[str]) -> Evidence:
    """Read logs, dumps and stacks. "-" is standard input.

    Raises UserError if a path does not exist.
    """
    parts: list[Part] = []
    read: list[Read] = []
    for part, what in _read_files(list(find_files(paths))):
        read.append(what)
        if part is not None:
            parts.append(part)
    counts = {"files": len(read), "lines": sum(one.lines for one in read), "bytes": sum(one.bytes for one in read)}
    runs, left_out = gather_runs(parts)
    read = [replace(one, left_out=left_out[one.source]) if one.source in left_out else one for one in read]
    seen = (part.attached for part in parts if part.source not in left_out)
    attached = tuple(one for one in seen if isinstance(one, AttachedJob))
    return Evidence(runs=runs, read=tuple(read), attached=attached, counts=counts)


def _read_files(files: Sequence[EvidenceFile]) -> Iterator[tuple[Part | None, Read]]:
    """Read the files in order, on all cores if there are many."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if len(files) < MANY_FILES or cores == 1 or any(file.path is None for file in files):
        yield from map(_read_file, files)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(min(cores, MOST_PROCESSES), get_context("fork")) as pool:
        yield from pool.map(_read_file, files, chunksize=8)


def _read_file(file: EvidenceFile) -> tuple[Part | None, Read]:
    """Read one file. Whatever fails in it costs this file, and the others are read."""
    if file.problem:
        return None, Read(source=file.name, formats=(), problem=file.problem)
    try:
        return _read_opened(file)
    except OSError as error:
        problem = error.strerror or str(error)
    except Exception as error:  # noqa: BLE001 - the wall around a reader of foreign files
        problem = f"ddpdoctor cannot read it: {type(error).__name__}: {error}"
    return None, Read(source=file.name, formats=(), problem=problem)


def _read_opened(file: EvidenceFile) -> tuple[Part | None, Read]:
    stream, head, modified = open_file(file)
    with stream:
        part = Part(source=file.name, attempt=file.attempt, modified=modified)
        reader = next((one for one in document_readers() if one.recognizes(head)), None)
        if reader is not None:
            return _read_document(reader, file, stream, head, part)
        if not head or not is_text(head):
            problem = stream.problem or ("" if head else "empty")
            return None, Read(source=file.name, formats=(), bytes=len(head), problem=problem)
        return _read_log(file, stream, head, part)


def _read_document(
    reader: DocumentReader, file: EvidenceFile, stream: FileContent, head: bytes, part: Part
) -> tuple[Part, Read]:
    body, cut = read_rest(stream, head)
    cut = cut or bool(stream.problem)
    document = Document(
        source=file.name, path=file.path, body=body, cut=cut, modified=part.modified, who=file.who
    )  # fmt: skip
    found = reader.read(document)
    part.facts = found.facts
    part.dumps = found.dumps
    part.attached = found.attached
    problem = stream.problem or found.problem
    if found.log_from is None:
        return part, Read(source=file.name, formats=(reader.name,), lines=found.lines, bytes=len(body), problem=problem)
    log = _Log(file, line_readers())
    stream.put_back(body)
    problem = log.read(stream, b"") or problem
    part.facts += [
        fact for fact in log.keeper.facts if not (isinstance(fact, Stacked) and (fact.spot.line or 0) < found.log_from)
    ]
    formats = dict.fromkeys((reader.name, *log.keeper.formats))
    return part, Read(source=file.name, formats=tuple(formats), lines=log.lines, bytes=log.bytes, problem=problem)


def _read_log(file: EvidenceFile, stream: FileContent, head: bytes, part: Part) -> tuple[Part | None, Read]:
    log = _Log(file, line_readers())
    problem = log.read(stream, head)
    if log.denies_name():
        again, head, _ = open_file(file)
        with again:
            log = _Log(replace(file, who=replace(file.who, rank=None)), line_readers())
            problem = log.read(again, head)
    part.facts = log.keeper.facts
    part.span, part.names = log.span, frozenset(log.names)
    what = Read(
        source=file.name, formats=tuple(log.keeper.formats), lines=log.lines, bytes=log.bytes, problem=problem
    )  # fmt: skip
    return (part if part.facts else None), what


class _Log:
    """A stream of lines. Only the blocks around triggers are read line by line, and the first and the last block."""

    def __init__(self, file: EvidenceFile, readers: Sequence[LineReader]) -> None:
        self.keeper = _Keeper()
        self.names: set[tuple[str, str]] = set()
        self.lines = 0
        self.bytes = 0
        self._splitter = LogSplitter(file.name, file.who)
        self._readers = readers
        self._info_readers = [one for one in readers if NCCL_INFO in one.triggers]
        self._funnel = Funnel(readers)
        self._goes_on = True
        """Whether the previous block was read line by line. A fact may begin there and end in this block."""

    def read(self, stream: FileContent, head: bytes) -> str:
        """Read it to its end; return why that was not possible, or an empty string."""
        rest = b""
        block = head or stream.read(BLOCK_BYTES)
        while block:
            self.bytes += len(block)
            block = block.replace(b"\0", b"") if b"\0" in block else block
            whole, rest = _cut(rest + block)
            block = stream.read(BLOCK_BYTES) if self.bytes < MOST_UNPACKED else b""
            self._take(whole, last=not block)
        self._take(rest, last=True)
        for reader in self._readers:
            self.keeper.keep(reader.name, reader.end())
        return stream.problem or ("longer than 64 GiB" if self.bytes >= MOST_UNPACKED else "")

    @property
    def span(self) -> tuple[float, float] | None:
        """The first and the last time in its lines, in seconds since the epoch, if they have dates."""
        return self._splitter.span

    def denies_name(self) -> bool:
        """Return whether lines of a file that is named after a rank are those of other ranks."""
        rank = self._splitter.known.rank
        if rank is None:
            return False
        own = (fact.who for fact in self.keeper.facts if isinstance(fact, Failed | Exited | Waiting | Reached))
        said = {who.rank for who in own} | {who.group_rank for who in own if not who.group} | self._splitter.ranks
        return bool(said - {None, rank})

    def _take(self, block: bytes, *, last: bool) -> None:
        wanted = self._funnel.wants(block)
        if wanted or self._goes_on or last:
            self._read_lines(block)
        else:
            self.lines += block.count(b"\n")
        self._goes_on = wanted

    def _read_lines(self, block: bytes) -> None:
        text = block.decode("utf-8", "replace")
        if len(self.names) < _MOST_NAMES:
            found = ((match[1].upper().replace("-", "_"), match[2]) for match in _JOB_NAMES.finditer(text))
            self.names |= {(_SAME_NAME.get(kind, kind), value) for kind, value in found if value.lower() != "none"}
        for line in self._splitter.lines(text, self.lines + 1, _is_read):
            for reader in self._info_readers if is_nccl_info(line.text) else self._readers:
                if facts := reader.read(line):
                    self.keeper.keep(reader.name, facts)
        self.lines += text.count("\n") + (bool(text) and not text.endswith("\n"))


def _is_read(text: str) -> bool:
    return not is_nccl_info(text) or is_read_info(text)


def _ends(fact: Fact) -> bool:
    return isinstance(fact, Exited | Stopped | Finished) or (isinstance(fact, Waiting) and fact.timed_out)


def _cut(block: bytes) -> tuple[bytes, bytes]:
    """Return the whole lines of a block, and the rest. A line that is longer than a block is cut at its end."""
    at = block.rfind(b"\n") + 1
    if at == 0 and len(block) > HEAD_BYTES:
        at = block.rfind(b"\r") + 1 or len(block)
    return block[:at], block[at:]
