"""Hooks in torch's elastic agent: which ranks started, how each ended, and a pause for evidence before a stop."""

from __future__ import annotations

import json
import mmap
import os
import time
from typing import Any, Set

from . import hooks, launcher_log
from .state import AGENT_VARIABLE, MASTER_VARIABLE, guarded, here
from .storage import ring_layout
from .storage.files import open_plain
from .wrappers import around

PAUSE_S = 1.2
"""The longest wait of the agent while the watcher takes evidence. The watcher needs less and says when it is done."""
POLL_S = 0.01
VERDICT_FILE = "verdict.txt"
"""Holds what the watcher found during the pause, as one line. The agent removes it after reading."""
MAX_VERDICT = 2000


class Log:
    """Appends lines of JSON to ``agent.jsonl``."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "agent.jsonl")
        self.attempt = -1
        self.meeting: Any = None
        """The attempt's number, the same on all nodes; None if torch does not give one."""
        self.ended: Set[int] = set()
        self.restarts_left: Any = None
        """How many times torchrun may start the ranks again; None if this torch does not say it."""

    def write(self, **entry: Any) -> None:
        """Append one line in one write."""
        text = json.dumps(dict(entry, at=time.monotonic_ns(), attempt=self.attempt)) + "\n"
        fd = open_plain(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


_log = Log(here.folder)


def patch(module: Any) -> None:
    """Put hooks around the contexts that start, poll and close the ranks, and around torchrun's own messages."""
    launcher_log.install()
    for name in ("SubprocessContext", "MultiprocessContext"):
        context = hooks.part(module, name)
        hooks.put(context, "_start", lambda original: around(original, _become_agent, _started))
        hooks.put(context, "_poll", lambda original: around(around(original, after=_note_ends), after=_put_verdict))
        hooks.put(context, "_close", lambda original: around(original, _closing, _note_ends))


def patch_inner(module: Any) -> None:
    """Let the agent of a job that a rank starts tell its ranks that the address which they get is the right one."""
    for name in ("SubprocessContext", "MultiprocessContext"):
        hooks.put(getattr(module, name, None), "_start", lambda original: around(original, _forget_store))


@guarded("inner agent")
def _forget_store(context: Any) -> None:
    os.environ.pop(MASTER_VARIABLE, None)


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
    """Put a hook after the rendezvous in which nodes agree on an attempt."""
    agent = hooks.part(module, "SimpleElasticAgent")
    hooks.put(agent, "_rendezvous", lambda original: around(original, after=_note_meeting))


@guarded("agent rendezvous")
def _note_meeting(agent: Any) -> None:
    """Keep the round of the rendezvous, because a node that joins late counts its own attempts from 0.

    A static rendezvous has no rounds, but there no node joins late, and all nodes restart equally often.
    """
    _log.restarts_left = agent._remaining_restarts
    spec = agent._worker_group.spec
    state = getattr(getattr(spec.rdzv_handler, "_state_holder", None), "state", None)
    _log.meeting = spec.max_restarts - agent._remaining_restarts if state is None else int(state.round)


@guarded("agent start")
def _started(context: Any) -> None:
    _log.attempt += 1
    _log.ended.clear()
    for local_rank, pid in context.pids().items():
        rank = context.envs[local_rank].get("RANK")
        world = context.envs[local_rank].get("WORLD_SIZE")
        _log.write(
            k="rank", local_rank=local_rank, pid=pid, rank=int(rank or local_rank), world_size=int(world or 0),
            meeting=_log.meeting,
        )  # fmt: skip


@guarded("agent verdict")
def _put_verdict(context: Any) -> None:
    """Put the watcher's verdict into torchrun's closing block, in place of its advice on how to get a traceback.

    torch has read the ranks' error files by now. If the script wrote an error file itself, its message stays.
    """
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
def _closing(context: Any) -> None:
    """Tell the watcher that ranks are about to be stopped, and wait until it has taken its evidence."""
    codes = _exit_codes(context)
    _note_ends(context)
    if any(codes.values()) and _log.restarts_left == 0:
        launcher_log.note_end()
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
