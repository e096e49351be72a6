"""Ends a rank of a trial, and writes what it tried.

``RANK.jsonl`` in the folder ``tuning`` of the run gets a line when a block begins and another when it ends: after a
crash it says which setting was being tried.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from ..speed import gradient_times
from ..state import here
from ..storage.files import make_folder, open_plain

FOLDER = "tuning"
LEFT = "left"
"""A file in that folder, made by the first rank of this host that leaves."""
TOGETHER_S = 5.0
"""Our choice: how long a rank waits for the others of its host to come to their end. If one goes first, the last
reduction of another may still read from its connection."""
LOOK_EVERY_S = 0.05
GRACE_S = 2.0
"""Our choice: a rank that is not stuck comes to its own end within this time after another has left."""


def write(entry: Any) -> None:
    """Append a line to this rank's file."""
    folder = _folder()
    make_folder(folder)
    _append(os.path.join(folder, "%s.jsonl" % _number()), json.dumps(entry) + "\n")


def leave(entry: Any) -> None:
    """End this process at once: no ``finally`` of the script runs, no checkpoint is written, no atexit function."""
    try:
        write(entry)
        gradient_times.settle_all()
        _append(os.path.join(_folder(), LEFT), _number() + "\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _wait_for_others()
        processes = sys.modules.get("multiprocessing.process")
        for child in processes.active_children() if processes is not None else ():
            child.kill()
    finally:
        os._exit(0)


def leave_with_others() -> None:
    """Follow another rank of this host that leaves, from a thread: this rank may wait for it in a reduction."""
    import threading

    threading.Thread(target=_follow, name="ddpdoctor-trial", daemon=True).start()


def _follow() -> None:
    path = os.path.join(_folder(), LEFT)
    while not os.path.exists(path):
        time.sleep(LOOK_EVERY_S)
    time.sleep(GRACE_S)
    leave({"end": "with another rank"})


def _wait_for_others() -> None:
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    until = time.monotonic() + TOGETHER_S
    while time.monotonic() < until and len(_numbers_left()) < count:
        time.sleep(LOOK_EVERY_S)


def _numbers_left() -> Any:
    with open(os.path.join(_folder(), LEFT)) as file:
        return set(file.read().split())


def _append(path: str, text: str) -> None:
    fd = open_plain(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _folder() -> str:
    return os.path.join(here.folder, FOLDER)


def _number() -> str:
    return os.environ.get("RANK", "0")
