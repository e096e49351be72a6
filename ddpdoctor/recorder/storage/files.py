"""Opens the files of a run folder: never a link, a device or a pipe, and private whatever the umask is."""

from __future__ import annotations

import errno
import os
import stat
import sys

from . import ring_layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
# Our choice: the most that is read from one file at once. A rank writes a thousandth of it.
MAX_FILE_BYTES = 64 * 2**20
# Our choice: a parsed value takes up to 120 bytes, however short its text. A report of 1,024 ranks has about 100,000.
MAX_JSON_VALUES = 2**20
# Without O_NONBLOCK, opening a pipe would wait until another process opens its other end.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def open_plain(path: Any, flags: int) -> int:
    """Open a regular file. One that ``flags`` create is private. Raises OSError, also for a link, pipe or folder."""
    try:
        fd = os.open(path, flags | _SAFE, PRIVATE_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return fd


# Our choice: in a process that may open fewer files, none is opened that only some evidence needs. A rank opens ten.
FEW_FILES = 64


def is_short_of_files() -> bool:
    """Return whether this process may open so few files that the script could run out because of ddpdoctor's."""
    import resource

    return 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < FEW_FILES


# C's function, looked up once: ``dlopen`` ends a forked child if a thread of its parent was just loading a library.
_mmap: Any = None


def map_file(fd: int, size: int, writable: bool = True) -> Any:
    """Map a file, and hold no file open: an ``mmap`` keeps a descriptor before Python 3.13. Raises OSError."""
    import mmap

    kind = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, prot=kind, trackfd=False)
    global _mmap
    try:
        import ctypes

        if _mmap is None:
            _mmap = ctypes.CDLL(None, use_errno=True).mmap
            _mmap.restype = ctypes.c_void_p
            _mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    except (ImportError, AttributeError, OSError):
        return mmap.mmap(fd, size, prot=kind)
    address = _mmap(None, size, kind, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "it cannot be mapped")
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def open_new(path: Any, mode: int = PRIVATE_FILE) -> int:
    """Make a file and open it for reading and writing. An existing file is removed, never written to."""
    remove(path)
    fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:  # noqa: SIM105 - contextlib would have to be loaded
        os.fchmod(fd, mode)
    except OSError:  # a file system without modes
        pass
    return fd


def write_at_once(path: Any, text: str, flags: int = os.O_APPEND) -> None:
    """Write a text in one write, to the end of a file or, with O_TRUNC, in place of what it has. Raises OSError."""
    fd = open_plain(path, os.O_CREAT | os.O_WRONLY | flags)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def write_whole(path: Any, data: str | bytes, mode: int = PRIVATE_FILE) -> None:
    """Write a file completely or not at all. Raises OSError."""
    part = os.fspath(path) + ".part"
    fd = open_new(part, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
        os.replace(part, path)
    except OSError:
        remove(part)
        raise


def remove(path: Any) -> None:
    try:  # noqa: SIM105 - contextlib would have to be loaded
        os.unlink(path)
    except OSError:
        pass


def make_folder(path: Any) -> None:
    """Make a private folder in a run folder, or keep an existing one. Raises OSError if it is a link or a file."""
    try:
        os.mkdir(path, PRIVATE_FOLDER)
        os.chmod(path, PRIVATE_FOLDER)
    except FileExistsError:
        if not is_folder(path):
            raise OSError(errno.ENOTDIR, "it is a link, or no folder", os.fspath(path)) from None


def is_folder(path: Any) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def is_file(path: Any) -> bool:
    return os.path.isfile(path)


def read_plain(path: Any, most: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file. Raises OSError if it cannot be read, is not regular, or exceeds ``most`` bytes."""
    fd = open_plain(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > most:
            raise OSError(errno.EFBIG, "it has more than %d bytes" % most, os.fspath(path))
        return file.read(size)


def read_end(path: Any, most: int) -> bytes:
    """Return the last bytes of a file, at most ``most``. Raises OSError if it is not a regular file or unreadable."""
    fd = open_plain(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        file.seek(max(0, os.fstat(fd).st_size - most))
        return file.read(most)


def check_json(data: bytes) -> bytes:
    """Return ``data`` if it is safe to parse. Raises ValueError if its values would take too much memory."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > MAX_JSON_VALUES:
        raise ValueError("it has more than %d values" % MAX_JSON_VALUES)
    return data


def parse_json(data: bytes) -> Any:
    """Parse JSON, with bytes that are not UTF-8 replaced. Raises ValueError, also if it is too deep or too large."""
    import json  # here, because in a short-lived Python the import costs more than all writing

    try:
        return json.loads(check_json(data).decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


CONTROL = "control"  # the page through which the watcher asks ranks for evidence


def make_record(folder: str) -> None:
    """Make the subfolders and the control file, unless they are there. Raises OSError."""
    for name in ("rings", "prints", "evidence"):
        make_folder(os.path.join(folder, name))
    path = os.path.join(folder, CONTROL)
    if os.path.lexists(path):
        return
    fd = open_new(path)
    try:
        os.posix_fallocate(fd, 0, ring_layout.CONTROL_SIZE)  # writing to a hole on a full disk is fatal
    finally:
        os.close(fd)
