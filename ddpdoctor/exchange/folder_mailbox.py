"""Messages by way of a folder that all hosts see: where no port gets through at all.

Every line has two files, one for its requests and one for the answers. Each is made once and then written in place, for
a network file system shows a reader who opens a file what was written before (close-to-open consistency of NFS), while
it may show a renamed or new file half a minute late. What is read half written fails its signature, and is read again.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib
from typing import TYPE_CHECKING

from ddpdoctor.exchange.forwarding import LINE_BYTES, MAX_MESSAGE_BYTES, MEETING_BYTES
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = ".room"
"""Within the folder that is shared."""
_ROOM = "room"
_ASKED = re.compile(rf"([0-9a-f]{{{2 * LINE_BYTES}}})\.asked")


class FolderOutbox:
    """A client's end."""

    def __init__(self, path: Path) -> None:
        """Take the shared folder."""
        self._folder = path / FOLDER
        self._lines: set[bytes] = set()

    def meeting(self) -> bytes | None:
        """Return the meeting that is served, as far as can be seen."""
        meeting = read_small(self._folder / _ROOM)
        return meeting if meeting is not None and len(meeting) == MEETING_BYTES else None

    def post(self, line: bytes, message: bytes) -> None:
        """Leave a message."""
        self._lines.add(line)
        write_in_place(self._folder / f"{line.hex()}.asked", message)

    def answer(self, line: bytes) -> bytes | None:
        """Return the last answer that was left for a line."""
        return read_small(self._folder / f"{line.hex()}.answered")

    def close(self) -> None:
        """Take away what this line has left."""
        for line in self._lines:
            remove(self._folder / f"{line.hex()}.asked")
            remove(self._folder / f"{line.hex()}.answered")


class FolderInbox:
    """The server's end."""

    def __init__(self, path: Path) -> None:
        """Take the shared folder."""
        self._folder = path / FOLDER
        self._seen: dict[str, int] = {}

    def open(self, meeting: bytes) -> None:
        """Say that this meeting is served; what was left for a former one is taken away."""
        make_folder(self._folder)
        self._clear()
        write_in_place(self._folder / _ROOM, meeting)

    def messages(self) -> Iterator[bytes]:
        """Return what has come since."""
        for name in self._names():
            message = read_small(self._folder / name) if _ASKED.fullmatch(name) else None
            # All of it counts: one that is seen half written has its size and its beginning already.
            if message and (seen := zlib.crc32(message)) != self._seen.get(name):
                self._seen[name] = seen
                yield message

    def reply(self, line: bytes, message: bytes) -> None:
        """Leave an answer for a line."""
        write_in_place(self._folder / f"{line.hex()}.answered", message)

    def close(self) -> None:
        """Take everything away."""
        self._clear()
        remove(self._folder / _ROOM)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _clear(self) -> None:
        for name in self._names():
            if found := _ASKED.fullmatch(name):
                remove(self._folder / name)
                remove(self._folder / f"{found[1]}.answered")

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._folder.iterdir()]
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be read: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Make a folder for this user alone, unless it is there; raises ``StoreError``."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be made: {error.strerror or error}") from error


def read_small(path: Path) -> bytes | None:
    """Return what a file holds; None where there is none, or no plain one within the limit."""
    try:
        # Neither a link nor a pipe that somebody has put there.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > MAX_MESSAGE_BYTES:
            return None
        with os.fdopen(file, "rb", closefd=False) as opened:
            return opened.read(MAX_MESSAGE_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(file)


def write_in_place(path: Path, data: bytes) -> None:
    """Write a file that others may read meanwhile; raises ``StoreError``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as opened:
            opened.write(data)
            opened.truncate()
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def remove(path: Path) -> None:
    """Take a file away, where it is there."""
    with contextlib.suppress(OSError):
        path.unlink()
