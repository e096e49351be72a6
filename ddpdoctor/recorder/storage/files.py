"""Opens the files of a run folder: never through a link, never a device or a pipe, private whatever the umask.

Every process that writes to a run folder or reads one uses this. It needs the standard library alone, because ranks
load it too.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
MAX_FILE_BYTES = 64 * 2**20
"""Ours: no more is read of one file at once. A rank writes a thousandth of it."""
MAX_JSON_VALUES = 2**20
"""Ours: parsed, a value takes up to 120 bytes, however short its text. A report of 1,024 ranks has some 100,000."""

_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Without O_NONBLOCK, to open a pipe would wait for whoever has its other end."""


def open_plain(path: Any, flags: int) -> int:
    """Open a regular file and return its descriptor; where ``flags`` make the file, nobody else may read it.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or a folder.
    """
    try:
        fd = os.open(path, flags | _SAFE, PRIVATE_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return fd


def open_new(path: Any) -> int:
    """Make a file and open it for reading and writing. What had the name before is removed, never written to."""
    try:
        fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        os.unlink(path)
        fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:  # noqa: SIM105 - contextlib would have to be loaded
        os.fchmod(fd, PRIVATE_FILE)
    except OSError:  # a file system without modes
        pass
    return fd


def write_whole(path: Any, data: str | bytes) -> None:
    """Write a file whole or not at all; raises OSError."""
    part = os.fspath(path) + ".part"
    fd = open_new(part)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
        os.replace(part, path)
    except OSError:
        remove(part)
        raise


def remove(path: Any) -> None:
    """Remove a file, if it is there and may be removed."""
    try:  # noqa: SIM105 - contextlib would have to be loaded
        os.unlink(path)
    except OSError:
        pass


def make_folder(path: Any) -> None:
    """Make a private folder in a run folder; one that is there is kept. Raises OSError where it is a link or a file."""
    try:
        os.mkdir(path, PRIVATE_FOLDER)
        os.chmod(path, PRIVATE_FOLDER)
    except FileExistsError:
        if not is_folder(path):
            raise OSError(errno.ENOTDIR, "it is a link, or no folder", os.fspath(path)) from None


def is_folder(path: Any) -> bool:
    """Return whether there is a folder, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def read_plain(path: Any, most: int = MAX_FILE_BYTES) -> bytes:
    """Return what is in a file.

    Raises:
        OSError: it cannot be read, is no regular file, or holds more than ``most`` bytes.
    """
    fd = open_plain(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > most:
            raise OSError(errno.EFBIG, "it has more than %d bytes" % most, os.fspath(path))
        return file.read(size)


def read_end(path: Any, most: int) -> bytes:
    """Return the last bytes of a file, at most so many; raises OSError as ``read_plain`` does."""
    fd = open_plain(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        file.seek(max(0, os.fstat(fd).st_size - most))
        return file.read(most)


def check_json(data: bytes) -> bytes:
    """Return JSON that is safe to parse; raises ValueError where its values would take too much memory."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > MAX_JSON_VALUES:
        raise ValueError("it has more than %d values" % MAX_JSON_VALUES)
    return data


def parse_json(data: bytes) -> Any:
    """Return what JSON says; bytes that are no UTF-8 are replaced.

    Raises:
        ValueError: it is damaged, nested too deeply, or has more values than ``check_json`` allows.
    """
    import json  # here, since it costs a short-lived Python more than all that is written

    try:
        return json.loads(check_json(data).decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
