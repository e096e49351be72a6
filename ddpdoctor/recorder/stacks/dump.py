"""Makes signals and fatal errors write stacks to files of ours, unless the script uses them itself.

SIGURG, which is ignored by default, so that it can never end a process, writes all stacks. SIGTERM, if no launcher
pauses for evidence before it stops the other ranks, writes the main thread's and still ends the process. faulthandler
knows the file only by its descriptor. A script may close all files that it did not open and then open its own, and
nothing of ours must be written to those.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal is made of; signal itself would load enum
import faulthandler
import os
import time

from ..state import guarded, here, pass_on
from ..storage.files import is_short_of_files, open_plain
from ..wrappers import wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Optional, Tuple

HIGH_NUMBERS = (1000, 240, 48)
"""The lowest descriptors that our files get, the first that the limit on open files allows. Our choice: below 1,024,
the usual limit, because the kernel's table grows with the highest descriptor, and above those that a script soon reuses
after closing all its files."""

_is_enabled = faulthandler.is_enabled
_enable = faulthandler.enable
_disable = faulthandler.disable
_register = faulthandler.register
_dump_later = faulthandler.dump_traceback_later
_cancel_dump = faulthandler.cancel_dump_traceback_later
_file: Optional[Tuple[int, int, int]] = None
"""Descriptor, device and inode of our file."""
_has_signal = False
_has_fatal = False
_fds: List[int] = []
"""The descriptor of the file that SIGTERM writes to, if there is one."""


def register() -> None:
    """Make SIGURG write all stacks, and fatal signals too, unless the script has enabled that itself."""
    global _file, _has_fatal
    if is_short_of_files() or not _signal_is_free():
        return
    fd = _open_high("dump", os.O_TRUNC)
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


def _open_high(suffix: str, flags: int) -> int:
    import fcntl

    path = os.path.join(here.folder, "evidence", "%d-%d.%s" % (os.getpid(), here.ticks, suffix))
    fd = open_plain(path, os.O_CREAT | os.O_WRONLY | flags)
    for lowest in HIGH_NUMBERS:
        try:
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        except OSError as error:
            pass_on(error)
            continue
        os.close(fd)
        return high
    return fd


def _is_there(file: Tuple[int, int, int]) -> bool:
    try:
        status = os.fstat(file[0])
    except OSError as error:
        pass_on(error)
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

    @wraps(_dump_later)
    def dump_traceback_later(timeout: Any, *args: Any, **kwargs: Any) -> None:
        _dump_later(timeout, *args, **kwargs)
        _note_limit(timeout, args[2] if len(args) > 2 else kwargs.get("exit"))

    @wraps(_cancel_dump)
    def cancel_dump_traceback_later() -> None:
        _cancel_dump()
        _note_limit(0, False)

    for function in (enable, disable, is_enabled, register, dump_traceback_later, cancel_dump_traceback_later):
        setattr(faulthandler, function.__name__, function)


@guarded("limit")
def _note_limit(timeout_s: Any, exits: Any) -> None:
    """Publish when faulthandler's own thread will end the process, or 0. It leaves no trace of that."""
    if here.ring is not None:
        here.ring.set("own_limit_ns", time.monotonic_ns() + int(float(timeout_s) * 1e9) if exits else 0)


@guarded("dump on SIGTERM")
def register_sigterm() -> None:
    """Make SIGTERM write the main thread's stack, unless this process or its parent has decided what SIGTERM does.

    The handler is faulthandler's, in C. So Python's own table still says that nobody handles SIGTERM, a handler that
    the script installs replaces it, and it works even if the main thread is blocked in a collective.
    """
    if _fds or is_short_of_files() or _signal.getsignal(_signal.SIGTERM) != _signal.SIG_DFL:
        return
    _fds.append(_open_high("term", os.O_APPEND))
    os.register_at_fork(after_in_child=_forked)
    # Only the main thread, which runs the handler: faulthandler must not read a stack that another thread changes.
    _register(_signal.SIGTERM, file=_fds[0], all_threads=False, chain=True)


@guarded("dump after fork")
def _forked() -> None:
    """Keep a forked child from writing to the parent's file. The handlers stay as the parent has set them."""
    if _fds:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _fds.pop(), inheritable=False)
        os.close(nowhere)
