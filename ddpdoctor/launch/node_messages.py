"""Messages of a wrapped job's members: ``Pulse`` in a beat, ``Board`` in its answer, larger ones under keys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import time
import zlib
from dataclasses import astuple, dataclass, fields, replace
from itertools import accumulate, pairwise
from operator import lt
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.exchange.conversation import BadMessage, BadRecord, decompress, read_json
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.facts import NodeSeen, Presence
from ddpdoctor.recorder.storage.files import check_json, open_new, read_plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.findings import Judgment

Message = TypeVar("Message")
GREETING, EVIDENCE, ROSTER, VERDICT = "greeting", "evidence", "roster", "verdict"
CLAIM = "claim"  # key of a counter, followed by a member number: how many members were started with that number
ARRIVALS = "arrivals"  # counts the members that joined without a number
SURPLUS = "surplus"  # counts the members whose number was already taken
# Our choice: a member sends the first and the last of its ranks, and all in between are made from them here.
MOST_RANKS, MOST_RANKS_OF_ALL = 1024, 2**20
MOST_NAME = 255  # the longest name of a host
LAST = 10**9  # used as the request number for the record that a member sends when it ends
MAX_PACKED_BYTES = 64 * 2**20  # Our choice: the meeting's limit for one value. A rank's record packs to about 100 KiB.
MAX_FILE_BYTES = 64 * 2**20
MAX_PLAIN_BYTES = 512 * 2**20  # our choice: 256 ranks on a node, each with a ring of 1 MiB and stacks of the same size
MAX_FILES = 8192
LEVEL = 1  # the fastest zlib level, because somebody waits
_LENGTH = struct.Struct("!I")
_PIECE_BYTES = 64 * 1024
# The files of a run folder that a judgment reads.
_KNOWN = re.compile(
    r"run\.json|agent\.jsonl|machine\.json|reached\.json|lost-\d+(-\d+)?"
    r"|(watch|consistency|moments)(-\d+)?\.json"
    r"|rings/\d+-\d+\.ring"
    r"|evidence/\d+-\d+(-\d+\.json|\.(dump|term|held|flight\d+))"
    r"|nccl/[\w.%-]{1,200}\.log"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """The progress of one node's ranks, as far as suspicion depends on it."""

    alive: int = 0
    starting: bool = False  # the launcher has no rank and was recently busy, for example loading torch
    # The launcher has no rank and has been idle for the hang timeout: it waits for other nodes, before the first start
    # or, after its ranks have failed, before a restart.
    never: bool = False
    begun: bool = False  # a live rank has initialized its process group
    # The longest time that a live rank has been in a call that needs others, or None if none is in one.
    waits_s: float | None = None
    stuck_s: float = 0.0  # the longest time that one of those ranks has made no progress in its call
    # The longest time that a live NCCL rank has made no progress, wherever it is, or None if there is no such rank.
    nccl_still_s: float | None = None
    # The number of live ranks without progress for the hang timeout. Time without a core does not count.
    still: int = 0
    # The same with that time, and with ranks that stood still when they ended: a rank that stood still has not moved by
    # getting no core, nor by being killed.
    stood: int = 0
    idle: bool = False  # one of those is in no call that needs others
    # Seconds since the last rank ended. None if none has ended, or if the launcher stops the rest: then the ranks of
    # other nodes notice the failure by themselves.
    ended_s: float | None = None
    # A rank's script ended longer ago than the hang timeout, and its process still runs without progress. An exit that
    # uploads a file makes progress, and time without a core does not count.
    lives_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The state of a member, sent with each beat."""

    progress: NodeProgress
    answered: int = 0  # the last request for evidence that it has answered in full; ``LAST`` once it has ended
    moved: bool = False  # whether its ranks have made progress since that request
    heard: int = 0  # the number of the last verdict that it received
    status: int | None = None  # the exit status of its launcher, once that has ended
    ranks: tuple[int, int] | None = None  # its first and last rank

    @property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.ranks[0], self.ranks[1] + 1)) if self.ranks else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The first member's notice to all, in the answer to each beat."""

    request: int = 0  # the number of the last request for evidence
    verdict: int = 0  # the number of the last verdict
    roster: int = 0  # how often the list of members has changed
    # The first member's launcher has ended. The last verdict follows when the others have ended or timed out.
    ends: bool = False
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Sent by a member once it has a number."""

    host: str
    pid: int
    started_as: int | None  # the number that it was started with
    wall_offset_s: float
    clock_offset_ns: int  # its CLOCK_MONOTONIC minus that of the first member's host
    clock_error_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberList:
    """All members as the first sees them, with times by the first member's clock."""

    nodes: tuple[NodeSeen, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """The first member's judgment of everybody's evidence."""

    judgment: Judgment
    stop: bool  # whether the job certainly hangs and is stopped
    place: str  # where the report is: "node0:/scratch/run"


def own_node(number: int, host: str, ranks: tuple[int, ...] = ()) -> NodeSeen:
    return NodeSeen(
        number=number, host=host, presence=Presence.HERE, heard_ns=time.monotonic_ns(), clock_offset_ns=0,
        clock_error_ns=0, wall_offset_s=0.0, gathered=True, ranks=ranks,
    )  # fmt: skip


def write_pulse(pulse: Pulse) -> bytes:
    """Encode a pulse for a beat, within 128 bytes."""
    values = [int(value) if isinstance(value, bool) else value for value in astuple(pulse.progress)]
    progress = [round(value, 1) if isinstance(value, float) else value for value in values]
    rest = [pulse.answered, int(pulse.moved), pulse.heard, pulse.status, pulse.ranks]
    return json.dumps([progress, *rest], separators=(",", ":")).encode()


def read_pulse(said: bytes) -> Pulse | None:
    try:
        progress, answered, moved, heard, status, ranks = read_json(said)
        named = dict(zip((field.name for field in fields(NodeProgress)), progress, strict=True))
        plain = {"progress": named, "answered": answered, "heard": heard, "status": status, "ranks": ranks}
        plain["progress"] |= {name: bool(named[name]) for name in ("starting", "never", "begun", "idle", "lives_on")}
        pulse = decode(Pulse, {**plain, "moved": bool(moved)})
    except (ValueError, TypeError, BadMessage, WrongValue):
        return None
    first, last = pulse.ranks or (0, 0)
    fit = 0 <= first <= last < first + MOST_RANKS and last < MOST_RANKS_OF_ALL
    return pulse if fit else replace(pulse, ranks=None)


def read_status(word: bytes) -> int | None:
    try:
        status = read_json(word)
    except BadMessage:
        return None
    return status if type(status) is int and abs(status) < 2**31 else None


def write_board(board: Board) -> bytes:
    return json.dumps([board.request, board.verdict, board.roster, int(board.ends), int(board.left)]).encode()


def read_board(notice: bytes) -> Board | None:
    try:
        request, verdict, roster, ends, left = map(int, read_json(notice))
    except (ValueError, TypeError, BadMessage):
        return None
    return Board(request=request, verdict=verdict, roster=roster, ends=bool(ends), left=bool(left))


def find(conversation: Conversation, kind: type[Message], key: str) -> Message | None:
    """Return a record, or None if it is missing or unreadable; an unreadable one counts as not sent."""
    try:
        return conversation.get(kind, key, "a member")
    except BadRecord:
        return None


def pack_folder(folder: Path) -> bytes:
    """Pack the files that a judgment reads; the largest stay out if need be. Raises OSError if the folder is gone."""
    sizes: dict[Path, int] = {}
    for path in _files(folder):
        sizes[path] = 0
        with contextlib.suppress(OSError):
            sizes[path] = path.stat().st_size
    left = MAX_PLAIN_BYTES - 2**20
    files: list[Path] = []
    for path in sorted(sizes, key=sizes.__getitem__)[:MAX_FILES]:
        left -= sizes[path]
        if sizes[path] <= MAX_FILE_BYTES and left >= 0:
            files.append(path)
    rows: list[tuple[str, int, list[int]]] = []  # name, size, and the numbers of the pieces that are not all zeros
    pieces: list[bytes] = []
    zeros = bytes(_PIECE_BYTES)
    for path in files:
        content = b""
        with contextlib.suppress(OSError):  # it may have vanished, as the files of loader workers do
            content = read_plain(path, MAX_FILE_BYTES)
        split = enumerate(content[at : at + _PIECE_BYTES] for at in range(0, len(content), _PIECE_BYTES))
        kept = {number: piece for number, piece in split if piece != zeros[: len(piece)]}
        rows.append((str(path.relative_to(folder)), len(content), list(kept)))
        pieces += kept.values()
    index = json.dumps(rows).encode()
    packer = zlib.compressobj(LEVEL)
    parts = [packer.compress(_LENGTH.pack(len(index)) + index), *map(packer.compress, pieces)]
    return b"".join([*parts, packer.flush()])


def unpack_folder(packed: bytes, folder: Path) -> None:
    """Unpack a run folder and replace ``folder`` with it; raises ``BadMessage``, or OSError if writing fails."""
    plain = decompress(packed, MAX_PLAIN_BYTES)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for name, size, pieces in _contents(plain):
        file = part / name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Write a file with holes instead of zeros, because the full rings of a thousand ranks would take a
        # gigabyte.
        with os.fdopen(open_new(file), "wb") as out:
            for number, piece in pieces.items():
                out.seek(number * _PIECE_BYTES)
                out.write(piece)
            out.truncate(size)
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the relevant files of a run folder. Of each process, that is its last answer and its ring at that time."""
    answers: dict[str, tuple[int, Path]] = {}
    kept = {path.stem for path in (folder / "evidence").glob("*.held")}
    for path in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        name = str(path.relative_to(folder))
        if not _KNOWN.fullmatch(name) or path.is_symlink() or not path.is_file():
            continue
        if name.startswith("rings/") and path.stem in kept:
            continue
        if name.startswith("evidence/") and name.endswith(".json"):
            process, _, request = path.stem.rpartition("-")
            answers[process] = max(answers.get(process, (-1, path)), (int(request), path))
        else:
            yield path
    yield from (path for _, path in answers.values())


def _contents(plain: bytes) -> list[tuple[str, int, dict[int, memoryview]]]:
    """Return each file's name, size, and pieces that are not all zeros, by their index; raises ``BadMessage``."""
    try:
        (length,) = _LENGTH.unpack_from(plain)
        index = json.loads(check_json(plain[_LENGTH.size : _LENGTH.size + length]))
        named = [(str(name), int(size), list(map(int, pieces))) for name, size, pieces in index]
    except (struct.error, ValueError, TypeError, RecursionError, OverflowError):
        raise BadMessage("a packed folder whose index cannot be read") from None
    if len(named) > MAX_FILES or len({name for name, _, _ in named}) < len(named):
        raise BadMessage("a packed folder with too many files, or with one of them twice")
    for name, size, pieces in named:
        places = range(-(-size // _PIECE_BYTES))
        in_order = all(number in places for number in pieces) and all(map(lt, pieces, pieces[1:]))
        if not _KNOWN.fullmatch(name) or not 0 <= size <= MAX_FILE_BYTES or not in_order:
            raise BadMessage("a packed folder with files that no run folder has")
    if sum(size for _, size, _ in named) > MAX_PLAIN_BYTES:
        raise BadMessage("a packed folder with files that no run folder has")
    view, at = memoryview(plain), _LENGTH.size + length
    found = []
    for name, size, pieces in named:
        ends = list(accumulate((min(_PIECE_BYTES, size - number * _PIECE_BYTES) for number in pieces), initial=at))
        parts = {number: view[begin:end] for number, (begin, end) in zip(pieces, pairwise(ends), strict=True)}
        found.append((name, size, parts))
        at = ends[-1]
    if at != len(plain):
        raise BadMessage("a packed folder that is not as long as its index says")
    return found
