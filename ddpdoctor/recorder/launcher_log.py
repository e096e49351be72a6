"""Keeps what torchrun says about the end of a job out of the terminal, in ``torchrun.log``.

``wrap`` shows the file if the job failed and there is no verdict. Only torchrun's own log records and its traceback are
kept, in its own process. The ranks write to the same streams as ever.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .state import guarded, here
from .storage import ring_layout
from .storage.files import open_plain
from .wrappers import wraps

OWN_VARIABLE = "DDPDOCTOR_TORCHRUN"
"""Set if ``wrap`` has started torchrun itself. Another launcher's messages are never kept."""
FILE = "torchrun.log"
STDERR = 2
THREADS_BANNER = "OMP_NUM_THREADS"
"""In torchrun's banner of four lines that it prints for every job with more than one rank on a host."""


class Messages:
    """What is known of torchrun's end."""

    is_ending = False
    """Whether all messages go to the file from now on."""


_messages = Messages()


def install() -> None:
    """Put hooks into the log and the excepthook of this process, if it is a torchrun that ``wrap`` has started."""
    if not os.environ.get(OWN_VARIABLE):
        return
    import logging  # here, because `wrap` itself imports this module and does not log

    handler: Any = logging.StreamHandler
    handler.emit = _keep_records(handler.emit)
    sys.excepthook = _keep_traceback(sys.excepthook)


def _keep_records(original: Any) -> Any:
    @wraps(original)
    def emit(handler: Any, record: Any) -> None:
        if not _keep_record(handler, record):
            original(handler, record)

    return emit


def _keep_traceback(original: Any) -> Any:
    @wraps(original)
    def excepthook(kind: Any, error: Any, traceback: Any) -> None:
        if not _messages.is_ending and kind.__name__ != "SignalException":
            original(kind, error, traceback)
            return
        from io import StringIO

        stream, sys.stderr = sys.stderr, StringIO()
        try:
            original(kind, error, traceback)
        finally:
            text, sys.stderr = sys.stderr.getvalue(), stream
        if not _keep(text):
            sys.stderr.write(text)

    return excepthook


def note_end() -> None:
    """Keep all that torchrun says from now on: a rank has failed, and the job is not started again."""
    _messages.is_ending = True


@guarded("launcher log")
def _keep_record(handler: Any, record: Any) -> bool:
    is_kept = _messages.is_ending or THREADS_BANNER in str(record.msg) or _is_stopped_by_watcher()
    return is_kept and handler.stream.fileno() == STDERR and _keep(handler.format(record) + "\n")


@guarded("watcher's stop")
def _is_stopped_by_watcher() -> bool:
    with open(os.path.join(here.folder, "control"), "rb") as file:
        return bool(ring_layout.CELL.unpack_from(file.read(ring_layout.CONTROL_SIZE), ring_layout.CONTROL_STOPPING)[0])


def _keep(text: str) -> bool:
    """Append to the file. Return False if the text must be shown: that failed, and the watcher may have no verdict."""
    return bool(_append(text) or _is_stopped_by_watcher())


@guarded("torchrun.log")
def _append(text: str) -> bool:
    from .storage.secrets import hide_in_text  # here, because it loads re

    fd = open_plain(os.path.join(here.folder, FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(hide_in_text(text))
    return True
