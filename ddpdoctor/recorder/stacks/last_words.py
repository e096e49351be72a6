"""Makes a rank write its main thread's stack when it gets SIGTERM. The signal still ends it.

This is used only if no launcher pauses for evidence before it stops the other ranks. The handler is faulthandler's, in
C. So Python's own table still says that nobody handles SIGTERM, a handler that the script installs replaces it, and it
works even if the main thread is blocked in a collective.
"""

from __future__ import annotations

import os

from ..state import guarded, here, is_short_of_files
from ..storage.files import open_plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

SUFFIX = ".term"
_HIGH = (1000, 240, 48)
"""Lowest descriptors to try. If the script closes all descriptors that it finds, high ones are reused last."""
_fds: List[int] = []


@guarded("last words")
def start() -> None:
    """Register the handler, unless this process or its parent has already decided what SIGTERM does."""
    import _signal  # type: ignore[import-not-found]
    import faulthandler

    if _fds or is_short_of_files() or _signal.getsignal(_signal.SIGTERM) != _signal.SIG_DFL:
        return
    path = os.path.join(here.folder, "evidence", "%d-%d%s" % (os.getpid(), here.ticks, SUFFIX))
    fd = open_plain(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    _fds.append(_out_of_the_way(fd))
    os.register_at_fork(after_in_child=_forked)
    # Only the main thread, which runs the handler: faulthandler must not read a stack that another thread changes.
    faulthandler.register(_signal.SIGTERM, file=_fds[0], all_threads=False, chain=True)


def _out_of_the_way(fd: int) -> int:
    import fcntl

    for lowest in _HIGH:
        try:
            moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        except OSError:
            continue
        os.close(fd)
        return moved
    return fd


@guarded("last words after fork")
def _forked() -> None:
    """Keep a forked child from writing to the parent's file. The handlers stay as the parent has set them."""
    if _fds:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _fds.pop(), inheritable=False)
        os.close(nowhere)
