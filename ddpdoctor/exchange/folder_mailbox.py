"""Carries messages through a folder that all hosts see, for networks where no port gets through.

Every client's line has two files, one for requests and one for answers. Each is created once and then written in place.
On a network file system a reader who opens a file sees everything written before (NFS's close-to-open consistency), but
a renamed or new file may show up half a minute late. A half-written message fails its signature check, so the reader
tries again.
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

FOLDER = ".meeting"
"""The subfolder of the shared folder that holds the messages."""
_MEETING = "meeting"
_ASKED = re.compile(rf"[0-9a-f]{{{2 * LINE_BYTES}}}\.asked")
_ANSWERED = re.compile(rf"[0-9a-f]{{{2 * LINE_BYTES}}}\.answered")


class FolderOutbox:
    """The client's end; implements ``forwarding.Outbox``."""

    def __init__(self, path: Path) -> None:
        """``path`` is the shared folder."""
        self._folder = path / FOLDER
        self._lines: set[bytes] = set()

    def meeting(self) -> bytes | None:
        """Return the ID of the meeting that the folder announces, or None if it announces none."""
        meeting = read_small(self._folder / _MEETING)
        return meeting if meeting is not None and len(meeting) == MEETING_BYTES else None

    def post(self, line: bytes, message: bytes) -> None:
        """Write a request of this line."""
        self._lines.add(line)
        write_in_place(self._folder / f"{line.hex()}.asked", message)

    def answer(self, line: bytes) -> bytes | None:
        """Return the last answer to a line, or None if there is none."""
        return read_small(self._folder / f"{line.hex()}.answered")

    def close(self) -> None:
        """Remove the files of this client's lines, and the folder if the server has left it."""
        for line in self._lines:
            remove(self._folder / f"{line.hex()}.asked")
            remove(self._folder / f"{line.hex()}.answered")
        if self._lines:
            _remove_empty(self._folder)


class FolderInbox:
    """The server's end; implements ``forwarding.Inbox``."""

    def __init__(self, path: Path) -> None:
        """``path`` is the shared folder."""
        self._folder = path / FOLDER
        self._seen: dict[str, int] = {}

    def open(self, meeting: bytes) -> None:
        """Remove the messages of an earlier meeting, and announce this one."""
        make_folder(self._folder)
        self._clear()
        write_in_place(self._folder / _MEETING, meeting)

    def messages(self) -> Iterator[bytes]:
        """Yield the requests that arrived since the last call."""
        for name in self._names():
            message = read_small(self._folder / name) if _ASKED.fullmatch(name) else None
            # The checksum covers the whole message: a half-written one already has its final size and beginning.
            if message and (seen := zlib.crc32(message)) != self._seen.get(name):
                self._seen[name] = seen
                yield message

    def reply(self, line: bytes, message: bytes) -> None:
        """Write the answer to a line."""
        write_in_place(self._folder / f"{line.hex()}.answered", message)

    def close(self) -> None:
        """Remove all messages, the announcement and the folder."""
        self._clear()
        remove(self._folder / _MEETING)
        _remove_empty(self._folder)

    def _clear(self) -> None:
        for name in self._names():
            if _ASKED.fullmatch(name) or _ANSWERED.fullmatch(name):
                remove(self._folder / name)

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._folder.iterdir()]
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be read: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Create a folder that only this user can access, unless it exists; raises ``StoreError``."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be made: {error.strerror or error}") from error


def read_small(path: Path) -> bytes | None:
    """Return the content of a file, or None if it is missing, not a regular file, or over the limit."""
    try:
        # Do not follow a link or block on a pipe that somebody put there.
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
    """Overwrite a file that others may be reading; raises ``StoreError``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as opened:
            opened.write(data)
            opened.truncate()
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def remove(path: Path) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it. Whichever side leaves last removes it."""
    with contextlib.suppress(OSError):
        folder.rmdir()
