"""Finds and opens evidence files, which are untrusted: sizes are limited, and links do not lead outside.

Only regular files are opened in folders, without waiting, and no more is read than they had when they were opened.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import errno
import lzma
import os
import re
import stat
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.log_facts import MOST_RANKS, Who

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

HEAD_BYTES = 64 * 2**10  # a reader recognizes a file by this many bytes
# Our choice: the limit for a file that must fit into memory. A dump of 2,000 entries has 2 MB.
MOST_BYTES = 256 * 2**20
MOST_UNPACKED = 2**36  # Our choice: the most that is unpacked of one file. A log of 64 GiB takes ten minutes to read.
MOST_FILES = 200_000  # our choice: 16,384 ranks may leave ten files each
# Our choice: how many times its size is unpacked of a file. Logs shrink to a tenth, and those of idle jobs to a
# hundredth; what was made to fill a disk shrinks a thousandfold and more.
MOST_RATIO = 200
LEAST_UNPACKED = 2**30  # our choice: so much is unpacked of any file
# Our choice: the memory for unpacking xz. ``xz -9`` takes 65 MiB, and a file can ask for 4 GiB.
MOST_DICTIONARY = 2**28
STDIN = "-"
_NO_TEXT = "".join(map(chr, [*range(1, 8), *range(14, 27), *range(28, 32), 127])) + "\ufffd"
_MOST_STRANGE = 0.02
_RANK = re.compile(r"(?P<of>[a-z]*)[_.-]?rank[_.=-]?(?P<rank>\d+)(?!.*rank[_.=-]?\d)", re.IGNORECASE)
# A rank of one of these in the name of a file is the number of a node, or of a process in a group.
_OTHER_RANKS = frozenset((
    "cp", "data", "dp", "ep", "etp", "expert", "group", "host", "intra", "local", "machine", "model", "mp", "node",
    "pipeline", "pp", "sp", "tensor", "tp",
))  # fmt: skip
_LOCAL = re.compile(r"attempt_(\d+)/(\d+)/[^/]+$")  # torchrun's layout below --log-dir: attempt, then local rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """A file to read."""

    name: str  # as the user gave it, or below the folder that the user gave
    path: Path | None  # None for standard input
    who: Who
    attempt: int | None = None  # the attempt that torchrun's folder names, or None
    problem: str = ""  # why the file must not be read


def find_files(paths: Sequence[str]) -> Iterator[LogFile]:
    """Yield the files to read, those of a folder sorted by name. Raises UserError if a path does not exist."""
    count = 0
    for given in paths:
        for found in [LogFile(name=STDIN, path=None, who=Who())] if given == STDIN else _below(Path(given)):
            count += 1
            if count > MOST_FILES:
                what = f"there are more than {MOST_FILES:,} files"
                raise UserError(what, help="Give the folders or files of one job.")
            yield found


def open_file(file: LogFile) -> tuple[FileContent, bytes, float | None]:
    """Open a file, unpacked if it is packed, and as UTF-8 if it is UTF-16.

    Return the content behind its first bytes, these, at most ``HEAD_BYTES``, and when the file was last written, in
    seconds since the epoch. NUL bytes at the beginning are left out: a log that was truncated while a program had it
    open begins with them. Raises OSError if it cannot be opened or is no longer a regular file.
    """
    content = FileContent(file.path)
    head, skipped = content.fill(HEAD_BYTES), 0
    while head and not head.strip(b"\0") and skipped < MOST_BYTES:
        skipped += len(head)
        head = content.fill(HEAD_BYTES)
    if (encoding := _wide_encoding(head)) is not None:
        head = content.decode(head, encoding)
        head += content.fill(HEAD_BYTES - len(head))
    return content, head.removeprefix(codecs.BOM_UTF8), content.modified


def is_text(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a text, even if some NUL bytes got into it.

    A disk that is full, or a host that crashes, leaves some or many of them in a log.
    """
    if b"\0" not in head:
        return True
    if b"\0" in head[:8] and head[8:9] == b"{":  # the size of the header of a file of safetensors
        return False
    text = head.replace(b"\0", b"").decode("utf-8", "replace")
    strange = sum(text.count(character) for character in _NO_TEXT)
    return bool(text) and strange <= _MOST_STRANGE * len(text)


def _wide_encoding(head: bytes) -> str | None:
    """Return the encoding of UTF-16, as PowerShell writes logs, with its mark at the beginning or without."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = head[:4096]
    half = len(sample) // 2
    zeros = sample[::2].count(0), sample[1::2].count(0)
    if half < 8 or min(zeros) > 0.1 * half or max(zeros) < 0.7 * half:
        return None
    return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"


class FileContent:
    """The content of a file, unpacked. Reading never raises: if it ends early, ``problem`` says why."""

    def __init__(self, path: Path | None) -> None:
        """Open a file, or standard input. Raises ``OSError``."""
        self.problem = ""
        self.modified: float | None = None
        self._decoder: codecs.IncrementalDecoder | None = None
        self._back = memoryview(b"")
        self._stream: IO[bytes] = sys.stdin.buffer
        # What is left of a regular file, of its size at opening: a job may write faster than we read.
        self._left: int | None = None
        self._sparse = False
        if path is not None:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            state = os.fstat(fd)
            is_pipe = stat.S_ISFIFO(state.st_mode) and _is_inherited(path)
            if not (stat.S_ISREG(state.st_mode) or is_pipe):
                os.close(fd)
                raise OSError("not a regular file")
            os.set_blocking(fd, is_pipe)
            self._stream = os.fdopen(fd, "rb", buffering=0 if not is_pipe else -1)
            if not is_pipe:
                self._left, self.modified = state.st_size, state.st_mtime
                self._sparse = state.st_size > MOST_BYTES and state.st_blocks * 512 < state.st_size
        self._ahead = b""
        self._ahead = self._fill_raw(6)
        self._taken, self._given = 0, 0
        self._new = next((make for magic, make in _PACKED.items() if self._ahead.startswith(magic)), None)
        self._unpacker = self._new() if self._new is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def decode(self, head: bytes, encoding: str) -> bytes:
        """Return the first bytes in UTF-8. From now on, what is read is decoded, too, and may have more bytes."""
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        return self._decoder.decode(head).encode("utf-8", "replace")

    def put_back(self, found: bytes) -> None:
        self._back = memoryview(found)

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most so many, or none at the end."""
        if self._back:
            found, self._back = bytes(self._back[:count]), self._back[count:]
            return found
        while (found := self._read(count)) and self._decoder is not None:
            if text := self._decoder.decode(found):
                return text.encode("utf-8", "replace")
        return found

    def _read(self, count: int) -> bytes:
        if self.problem:
            return b""
        if self._unpacker is None:
            return self._raw(count)
        try:
            found = self._unpack(count)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, MemoryError) as error:
            self.problem, found = f"damaged: {error or type(error).__name__}", b""
            if isinstance(self._unpacker, _Gzip):
                found = self._unpacker.rescue()
        self._given += len(found)
        if self._given > max(LEAST_UNPACKED, MOST_RATIO * self._taken):
            self.problem = f"unpacks to more than {MOST_RATIO} times its size; reading stopped there"
        return found

    def fill(self, count: int) -> bytes:
        """Return the next ``size`` bytes, or fewer at the end of the file. A pipe may return fewer per read."""
        parts, left = [], count  # a sum of bytes would copy what is packed a thousand times
        while left > 0 and (more := self.read(left)):
            parts.append(more)
            left -= len(more)
        return b"".join(parts)

    def look_for_damage(self) -> None:
        """Read a packed file on for one block of bzip2, which gives the bytes of a block before it checks them."""
        if self._unpacker is not None:
            self.fill(_MOST_UNCHECKED)

    def _unpack(self, count: int) -> bytes:
        while True:
            assert self._unpacker is not None
            assert self._new is not None
            if self._unpacker.eof:
                rest = self._unpacker.unused_data or self._raw(_PIECE)
                rest += self._fill_raw(6 - len(rest)) if len(rest) < 6 else b""
                if not rest.strip(b"\0"):  # padding, as tar writes it
                    return b""
                self._ahead, self._unpacker = rest + self._ahead, self._new()
            packed = self._raw(_PIECE) if self._unpacker.needs_input else b""
            if self._unpacker.needs_input and not packed:
                self.problem = "cut off"
                return b""
            self._taken += len(packed)
            if found := self._unpacker.decompress(packed, count):
                return bytes(found)

    def _raw(self, count: int) -> bytes:
        """Return the next bytes as they stand in the file. Holes of a large file are left out."""
        if self._ahead:
            found, self._ahead = self._ahead[:count], self._ahead[count:]
            return found
        try:
            while True:
                if self._sparse and self._left:
                    at = self._stream.tell()
                    self._left -= self._stream.seek(at, os.SEEK_DATA) - at
                found = self._stream.read(count if self._left is None else max(0, min(count, self._left))) or b""
                self._left = None if self._left is None else self._left - len(found)
                text = found.replace(b"\0", b"") if self._sparse else found  # holes begin and end with blocks
                if text or not found:
                    return text
        except OSError as error:
            no_data_left = self._sparse and error.errno == errno.ENXIO
            self.problem = "" if no_data_left else error.strerror or str(error)
            return b""

    def _fill_raw(self, count: int) -> bytes:
        found = b""
        while len(found) < count and (more := self._raw(count - len(found))):
            found += more
        return found


class _Gzip:
    """Unpacks one member of a gzip file, with the interface of the other two."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(31)
        self._last: tuple[Any, bytes] = (self._inner, b"")

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail and not self.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, most: int) -> bytes:
        data = self._inner.unconsumed_tail + data
        self._last = (self._inner.copy(), data)
        return self._inner.decompress(data, most)

    def rescue(self) -> bytes:
        """Return what comes before the damage that the last call found: zlib gives nothing of such a call."""
        inner, data = self._last
        found = b""
        with contextlib.suppress(zlib.error):
            for at in range(len(data)):
                found += inner.decompress(data[at : at + 1])
        return found


_MOST_UNCHECKED = 900_000  # the largest block of bzip2, in bytes

_PIECE = 2**14  # our choice: so much of a packed file is unpacked at once
_PACKED: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": _Gzip,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\x00": lambda: lzma.LZMADecompressor(memlimit=MOST_DICTIONARY),
}


def _below(path: Path) -> Iterator[LogFile]:
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        remedy = "Give logs, dumps, stacks, or folders of them; - reads standard input."
        raise UserError(f"{path} does not exist", help=remedy) from None
    except OSError as error:
        yield _file(path, None, error.strerror or str(error))
        return
    if not is_folder:
        yield _file(path, None)
        return
    root, waiting = os.path.realpath(path), [path]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            yield _file(folder, None, f"the folder cannot be read: {error.strerror}")
            continue
        deeper = []
        for entry in inside:
            if entry.is_dir(follow_symlinks=False):
                deeper.append(Path(entry.path))
            elif not os.path.isdir(entry.path):  # noqa: PTH112 - False also for a link that cannot be followed
                yield _file(Path(entry.path), root)
        waiting += reversed(deeper)


def _file(path: Path, root: str | None, problem: str = "") -> LogFile:
    """Describe a file. ``root`` is the folder that the user gave, which no link may leave."""
    problem = problem or _problem_of(path, root)
    local = _LOCAL.search(path.as_posix())
    rank = _RANK.search(path.name) or _RANK.search(path.parent.name)
    is_global = rank is not None and rank["of"].lower() not in _OTHER_RANKS
    number = int(rank["rank"][:9]) if rank is not None and is_global else MOST_RANKS
    who = Who(rank=number if number < MOST_RANKS else None, local_rank=int(local[2]) if local else None)
    # A name may hold bytes that are not UTF-8, which cannot be written to a report.
    name = os.fsencode(path).decode("utf-8", "backslashreplace").replace("\n", "\\n")
    return LogFile(
        name=name, path=path, who=who, attempt=int(local[1]) if local else None, problem=problem
    )  # fmt: skip


def _problem_of(path: Path, root: str | None) -> str:
    real = os.path.realpath(path) if root is None or path.is_symlink() else root
    if root is not None and os.path.commonpath((root, real)) != root:
        return "a link to outside the folder"
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if root is not None and error.errno in {errno.ENOENT, errno.ELOOP} and path.is_symlink():
            return "a broken link"
        return "it no longer exists" if error.errno == errno.ENOENT else error.strerror or str(error)
    if str(path.absolute() if real == root else real).startswith(("/proc/", "/sys/")) and not _is_inherited(path):
        return "a kernel file, which may never end; copy its contents to a file"
    if stat.S_ISREG(mode) or (root is None and stat.S_ISFIFO(mode) and _is_inherited(path)):
        return ""
    if root is None and stat.S_ISFIFO(mode):
        return "a named pipe, which may never end; `ddpdoctor analyze - < PIPE` reads one"
    return "not a regular file"


def _is_inherited(path: Path) -> bool:
    """Return whether a path is an open descriptor of this process, as the shell's ``<(command)`` is."""
    return re.fullmatch(r"/dev/(fd/\d+|stdin)|/proc/self/fd/\d+", str(path)) is not None
