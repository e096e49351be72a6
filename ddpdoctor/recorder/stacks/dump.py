"""Makes a signal, and a fatal error, write all stacks to a file of ours, unless the script uses them itself.

The signal is SIGURG, which is ignored by default, so that it can never end a process. faulthandler knows the file only
by its descriptor. A script may close all files that it did not open and then open its own, and nothing of ours must be
written to those.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal is made of; signal itself would load enum
import faulthandler
import os

from ..state import here, is_short_of_files
from ..storage.files import open_plain
from ..wrappers import wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Tuple

HIGH_NUMBER = 1000
"""The descriptor that our file gets. Our choice: below 1,024, the usual limit, because the kernel's table grows with
the highest descriptor, and above those that a script soon reuses after closing all its files."""

_is_enabled = faulthandler.is_enabled
_enable = faulthandler.enable
_disable = faulthandler.disable
_register = faulthandler.register
_file: Optional[Tuple[int, int, int]] = None
"""Descriptor, device and inode of our file."""
_has_signal = False
_has_fatal = False


def register() -> None:
    """Make SIGURG write all stacks, and fatal signals too, unless the script has enabled that itself."""
    global _file, _has_fatal
    if is_short_of_files() or not _signal_is_free():
        return
    fd = _open_high(os.path.join(here.folder, "evidence", "%d-%d.dump" % (os.getpid(), here.ticks)))
    status = os.fstat(fd)
    _file = (fd, status.st_dev, status.st_ino)
    _register(_signal.SIGURG, file=fd, all_threads=True, chain=False)
    _note_signal(True)
    if not _is_enabled():
        _enable(file=fd, all_threads=True)
        _has_fatal = True
    _yield_to_script()


def check() -> None:
    """Stop writing if the script has taken the signal for itself or closed our file."""
    if _file is None:
        return
    if not _is_there(_file):
        forget()
    elif _has_signal and not _signal_is_free():
        _forget_signal()


def forget() -> None:
    """Stop writing to the file, because it is another process's or no longer ours."""
    global _file, _has_fatal
    _forget_signal()
    if _has_fatal:
        _has_fatal = False
        _disable()
    _file = None


def _forget_signal() -> None:
    """Remove our handler, unless the script has replaced it. From now on there are no dumps on request."""
    if _has_signal and _signal_is_free():
        faulthandler.unregister(_signal.SIGURG)
    _note_signal(False)


def _note_signal(has_signal: bool) -> None:
    """Publish for the watcher whether SIGURG, sent to this process, writes stacks and does nothing else."""
    global _has_signal
    _has_signal = has_signal
    if here.ring is not None:
        here.ring.set("dumps_on_signal", int(has_signal))


def _signal_is_free() -> bool:
    return bool(_signal.getsignal(_signal.SIGURG) == _signal.SIG_DFL)


def _open_high(path: str) -> int:
    fd = open_plain(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for number in range(HIGH_NUMBER, HIGH_NUMBER + 8):
        try:
            os.fstat(number)
        except OSError:
            break
    else:
        return fd
    try:
        os.dup2(fd, number, inheritable=False)
    except OSError:  # the limit on open files is lower
        return fd
    os.close(fd)
    return number


def _is_there(file: Tuple[int, int, int]) -> bool:
    try:
        status = os.fstat(file[0])
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == file[1:]


def _yield_to_script() -> None:
    """Make ``faulthandler`` answer a script as it would without us, and let what the script enables replace ours."""

    @wraps(_enable)
    def enable(*args: Any, **kwargs: Any) -> None:
        global _has_fatal
        _enable(*args, **kwargs)
        _has_fatal = False

    @wraps(_disable)
    def disable() -> bool:
        return False if _has_fatal else bool(_disable())

    @wraps(_is_enabled)
    def is_enabled() -> bool:
        return bool(_is_enabled()) and not _has_fatal

    @wraps(_register)
    def register(*args: Any, **kwargs: Any) -> None:
        _register(*args, **kwargs)
        if _signal.SIGURG in (*args[:1], kwargs.get("signum")):
            _note_signal(False)

    for function in (enable, disable, is_enabled, register):
        setattr(faulthandler, function.__name__, function)
