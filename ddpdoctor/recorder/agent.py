"""Hooks in torch's elastic agent: which ranks started, how each ended, and a pause for evidence before a stop.

In a torchrun that ``wrap`` has started, its messages about the end of a job go to ``torchrun.log``.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from typing import Any, Set

from . import hooks
from .state import AGENT_VARIABLE, MASTER_VARIABLE, guarded, here
from .storage import ring_layout
from .storage.files import open_plain, write_at_once
from .wrappers import around, unless, wraps

# The longest wait of the agent while the watcher takes evidence. The watcher needs less and says when it is done.
PAUSE_S = 1.2
POLL_S = 0.01
# Holds what the watcher found during the pause, as one line. The agent removes it after reading.
VERDICT_FILE = "verdict.txt"
MAX_VERDICT = 2000
# Set if ``wrap`` has started torchrun itself. Another launcher's messages are never kept.
OWN_VARIABLE = "DDPDOCTOR_TORCHRUN"
LOG_FILE = "torchrun.log"
STDERR = 2
# In torchrun's banner of four lines that it prints for every job with more than one rank on a host.
THREADS_BANNER = "OMP_NUM_THREADS"


class Log:
    """Appends lines of JSON to ``agent.jsonl``."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "agent.jsonl")
        self.attempt = -1
        self.meeting: Any = None  # The attempt's number, the same on all nodes; None if torch does not give one.
        self.ended: Set[int] = set()
        # How many times torchrun may start the ranks again; None if this torch does not say it.
        self.restarts_left: Any = None
        # Whether all that torchrun says goes to its file: a rank has failed, and the job is not started again.
        self.keeps_messages = False

    def write(self, **entry: Any) -> None:
        write_at_once(self.path, json.dumps(dict(entry, at=time.monotonic_ns(), attempt=self.attempt)) + "\n")


_log = Log(here.folder)


def patch(module: Any) -> None:
    """Put hooks around the contexts that start, poll and close the ranks, and around torchrun's own messages."""
    if os.environ.get(OWN_VARIABLE):
        import logging  # here, because `wrap` itself imports this module and does not log

        @guarded("launcher log")
        def keep(handler: Any, record: Any) -> bool:
            is_kept = _log.keeps_messages or THREADS_BANNER in str(record.msg) or _is_stopped_by_watcher()
            return is_kept and handler.stream.fileno() == STDERR and _keep_text(handler.format(record) + "\n")

        original = sys.excepthook

        @wraps(original)
        def excepthook(kind: Any, error: Any, traceback: Any) -> None:
            if not _log.keeps_messages and kind.__name__ != "SignalException":
                original(kind, error, traceback)
                return
            from io import StringIO

            stream, sys.stderr = sys.stderr, StringIO()
            try:
                original(kind, error, traceback)
            finally:
                text, sys.stderr = sys.stderr.getvalue(), stream
            if not _keep_text(text):
                sys.stderr.write(text)

        handler: Any = logging.StreamHandler
        handler.emit, sys.excepthook = unless(keep)(handler.emit), excepthook
    for name in ("SubprocessContext", "MultiprocessContext"):
        context = hooks.part(module, name)
        hooks.put(context, "_start", around(_become_agent, _started))
        hooks.put(context, "_poll", around(after=_note_ends))
        hooks.put(context, "_poll", around(after=_put_verdict))
        hooks.put(context, "_close", around(_closing, _note_ends))


def patch_inner(module: Any) -> None:
    """Let the agent of a job that a rank starts tell its ranks that the address they get is correct."""

    @guarded("inner agent")
    def forget_store(context: Any) -> None:
        os.environ.pop(MASTER_VARIABLE, None)

    for name in ("SubprocessContext", "MultiprocessContext"):
        hooks.put(getattr(module, name, None), "_start", around(forget_store))


@guarded("agent")
def _become_agent(context: Any) -> None:
    """Record that this process's children are ranks, and that it is not one itself, even if a launcher numbered it."""
    if os.environ.get(AGENT_VARIABLE) == str(os.getpid()):
        return
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    here.demote()
    _log.write(k="agent", pid=os.getpid())
    _log.write(**hooks.entry())


def patch_meetings(module: Any) -> None:
    @guarded("agent rendezvous")
    def note_meeting(agent: Any) -> None:
        """Keep the round: a node that joins late counts its attempts from 0. In a static rendezvous none does."""
        _log.restarts_left = agent._remaining_restarts
        spec = agent._worker_group.spec
        state = getattr(getattr(spec.rdzv_handler, "_state_holder", None), "state", None)
        _log.meeting = spec.max_restarts - agent._remaining_restarts if state is None else int(state.round)

    hooks.put(hooks.part(module, "SimpleElasticAgent"), "_rendezvous", around(after=note_meeting))


@guarded("agent start")
def _started(context: Any) -> None:
    _log.attempt += 1
    _log.ended.clear()
    for local_rank, pid in context.pids().items():
        given = context.envs[local_rank]
        rank, world_size = int(given.get("RANK") or local_rank), int(given.get("WORLD_SIZE") or 0)
        _log.write(k="rank", local_rank=local_rank, pid=pid, rank=rank, world_size=world_size, meeting=_log.meeting)


@guarded("agent verdict")
def _put_verdict(context: Any) -> None:
    """Put the watcher's verdict into torchrun's closing block, unless the script wrote an error file itself."""
    failures = getattr(context, "_failures", None)
    path = os.path.join(here.folder, VERDICT_FILE)
    if not failures or not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        text = file.read(MAX_VERDICT)
    os.unlink(path)
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    if not os.path.isfile(first.error_file):
        first.message = text


def _exit_codes(context: Any) -> Any:
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers:
        return {handler.proc.pid: handler.proc.poll() for handler in handlers.values()}
    processes = getattr(getattr(context, "_pc", None), "processes", None) or ()
    return {process.pid: process.exitcode for process in processes}


@guarded("agent poll")
def _note_ends(context: Any) -> None:
    for pid, code in _exit_codes(context).items():
        if code is not None and pid not in _log.ended:
            _log.ended.add(pid)
            _log.write(k="end", pid=pid, code=code)


@guarded("agent close")
def _closing(context: Any, *unused: Any, **also_unused: Any) -> None:
    """Tell the watcher that ranks are about to be stopped, and wait until it has taken its evidence."""
    codes = _exit_codes(context)
    _note_ends(context)
    if any(codes.values()) and _log.restarts_left == 0:
        _log.keeps_messages = True
    if all(code is not None for code in codes.values()):
        return
    _log.write(k="closing", running=[pid for pid, code in codes.items() if code is None])
    fd = open_plain(os.path.join(here.folder, "control"), os.O_RDWR)
    try:
        control = mmap.mmap(fd, ring_layout.CONTROL_SIZE)
    finally:
        os.close(fd)
    began = time.monotonic_ns()
    ring_layout.CELL.pack_into(control, ring_layout.CONTROL_CLOSING, began)
    limit = began + int(PAUSE_S * 1e9)
    while time.monotonic_ns() < limit and ring_layout.CELL.unpack_from(control, ring_layout.CONTROL_ACK)[0] < began:
        time.sleep(POLL_S)
    control.close()


@guarded("watcher's stop")
def _is_stopped_by_watcher() -> bool:
    with open(os.path.join(here.folder, "control"), "rb") as file:
        return bool(ring_layout.CELL.unpack_from(file.read(ring_layout.CONTROL_SIZE), ring_layout.CONTROL_STOPPING)[0])


def _keep_text(text: str) -> bool:
    """Append to the file. Return False if the text must be shown: that failed, and the watcher may have no verdict."""
    try:
        from .storage.secrets import hide_in_text  # here, because it loads re

        fd = open_plain(os.path.join(here.folder, LOG_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(hide_in_text(text))
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("torchrun.log", error)
        return bool(_is_stopped_by_watcher())
    return True
