"""Follows what works for the main thread and leaves no trace on its stack: asyncio tasks, and calls in pools.

A loop that waits shows only ``select``; the user's line is in the coroutine that the main task runs. An error in a task
that is not awaited, or in a call whose result is not asked for, ends nothing and is printed late or never.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque

from .. import frames
from ..state import guarded, here, sealed, wall
from ..wrappers import hide_own_frames, wraps
from .error_details import frames_of, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque, Dict, Iterator, List

    Frames = List[Dict[str, Any]]

MOST_TASKS = 8
"""Links from a task to the task that it awaits. Our choice."""
MOST_AWAITS = 60
MOST_KEPT = 16
"""Errors of tasks and calls that are kept. Our choice: a server may lose one for each request."""
TRIES = 3
_IN_LOOP = ("/selectors.py", "/asyncio/", "/uvloop/")
"""A thread whose innermost frame is in one of these runs an event loop that has nothing to do."""
_RUNNERS = {"run": "task", "run_until_complete": "future", "run_forever": ""}
"""By function of asyncio: its variable with the task that it runs, if there is one."""
_REMOTE_LINE = r'^\s*File "([^"\n]+)", line (\d+), in (\S+)'
_kept: Deque[Dict[str, Any]] = deque(maxlen=MOST_KEPT)
"""The errors of calls in pools, with whether somebody has read them, and of tasks that are gone."""


@guarded("awaited line")
def awaited(thread: int) -> Frames:
    """Return the frames of the coroutines that a thread's event loop waits for, outermost first.

    They belong below the frames of the thread itself. The list is empty if it runs no loop, or the loop is at work. A
    loop that runs until it is stopped waits for its oldest task that no other task awaits.
    """
    stack = frames.of_thread(thread)
    if not stack or not any(part in stack[0][0].co_filename for part in _IN_LOOP):
        return []
    loop = None
    for depth, (code, _) in enumerate(stack):
        if "/asyncio/" in code.co_filename and code.co_name in _RUNNERS:
            given = frames.locals_of(thread, depth, code)
            task = given.get(_RUNNERS[code.co_name])
            if hasattr(task, "get_coro"):
                return _frames_of_task(task)
            loop = given.get("self") if code.co_name == "run_forever" else loop
    tasks = [t for t in _all_tasks(sys.modules["asyncio.tasks"]) if not t.done() and t.get_loop() is loop]
    inner = [id(one) for task in tasks for one in _awaited_by(task, None)]
    tasks.sort(key=lambda task: (len(task.get_name()), task.get_name()))  # Task-9 before Task-10
    return next((_frames_of_task(task) for task in tasks if id(task) not in inner), [])


def _frames_of_task(task: Any) -> Frames:
    """Return the lines at which a task, and the task that it awaits, and so on, stand."""
    found: Frames = []
    seen: List[int] = []
    while task is not None and len(seen) < MOST_TASKS and id(task) not in seen:
        seen.append(id(task))
        step = getattr(task, "get_coro", lambda: None)()
        last = None
        for _ in range(MOST_AWAITS):
            frame = (
                getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None) or getattr(step, "ag_frame", None)
            )
            if frame is not None:
                last = frame
                found.append(frames.describe(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
            step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
            if step is None:
                break
        task = next(_awaited_by(task, last), None)
    return frames.trim(found)


def _awaited_by(task: Any, last: Any) -> Iterator[Any]:
    """Return the unfinished tasks that a task waits for: directly, by gather, or in a function of asyncio."""
    waiter = getattr(task, "_fut_waiter", None)
    candidates = [waiter, *(getattr(waiter, "_children", None) or ())]
    if last is not None and "/asyncio/" in last.f_code.co_filename:  # wait, wait_for, TaskGroup.__aexit__
        for value in list(last.f_locals.values()):
            candidates += list(value) if isinstance(value, (set, list, tuple)) else [value]
            candidates += list(getattr(value, "_tasks", None) or ())
    for one in candidates:
        if one is not None and one is not task and hasattr(one, "get_coro") and not one.done():
            yield one


def lost() -> List[Dict[str, Any]]:
    """Return the errors that ended tasks and calls in pools, and that nobody has read."""
    found = [dict(entry) for entry in list(_kept) if not entry["read"]]
    tasks = sys.modules.get("asyncio.tasks")
    for task in _all_tasks(tasks) if tasks is not None else ():
        if task.done() and not task.cancelled() and getattr(task, "_log_traceback", False):
            error = getattr(task, "_exception", None)
            if error is not None:
                found.append(_entry("task", str(task.get_name()) if hasattr(task, "get_name") else "", error))
    return found[-MOST_KEPT:]


def _all_tasks(module: Any) -> List[Any]:
    """Return all tasks that are still held, also those that are done; ``asyncio.all_tasks`` leaves those out."""
    for _ in range(TRIES):
        try:
            if sys.version_info >= (3, 14):  # tasks that are done are in no list
                import gc

                return [one for one in gc.get_objects() if type(one) is module.Task]
            known: Any = getattr(module, "_scheduled_tasks", None) or getattr(module, "_all_tasks", ())
            return list(known)
        except RuntimeError:  # a task was made meanwhile
            continue
    return []


def _entry(who: str, name: str, error: BaseException) -> Dict[str, Any]:
    if type(error.__cause__).__name__ in ("_RemoteTraceback", "RemoteTraceback"):  # of a process in a pool
        lines = re.findall(_REMOTE_LINE, str(error.__cause__), re.MULTILINE)
        raised_at = [frames.describe(file, int(line), function) for file, line, function in lines]
    else:
        raised_at = frames_of(error.__traceback__)
    return {
        "who": who,
        "name": name[:80],
        "type": type(error).__name__,
        "text": text_of(error)[:2000],
        "at": time.monotonic_ns(),
        "frames": raised_at,
        "read": 0,
    }


def patch_loop(module: Any) -> None:
    """Patch asyncio.base_events: keep errors of callbacks and gone tasks, which the loop prints before it goes on."""
    original = module.BaseEventLoop.call_exception_handler

    @wraps(original)
    def call_exception_handler(self: Any, context: Any) -> Any:
        _keep_of_task(context)
        return original(self, context)

    module.BaseEventLoop.call_exception_handler = call_exception_handler


@guarded("task error")
def _keep_of_task(context: Any) -> None:
    error, task = context.get("exception"), context.get("task") or context.get("future")
    if error is not None and here.ring is not None:
        _kept.append(_entry("task", str(task.get_name()) if hasattr(task, "get_name") else "", error))


def patch_futures(module: Any) -> None:
    """Patch concurrent.futures._base: keep the error of a call in a pool until somebody reads it."""
    _patch(module.Future, "set_exception", ("result", "exception"), lambda future, exception: exception)


def patch_pool(module: Any) -> None:
    """Patch multiprocessing.pool likewise."""
    _patch(module.ApplyResult, "_set", ("get",), lambda result, i, obj: None if obj[0] else obj[1])


def _patch(owner: Any, setter: str, readers: Any, error_of: Any) -> None:
    setting = getattr(owner, setter)

    @guarded("pool error")
    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        error = error_of(self, *args, **kwargs)
        if error is not None and here.ring is not None:
            entry = _entry("call", "", error)
            _kept.append(entry)
            self._ddpdoctor_error = entry

    @wraps(setting)
    def set_error(self: Any, *args: Any, **kwargs: Any) -> Any:
        keep(self, *args, **kwargs)
        return setting(self, *args, **kwargs)

    setattr(owner, setter, set_error)
    for name in readers:
        setattr(owner, name, _reading(getattr(owner, name)))


def _reading(original: Any) -> Any:
    """Return a method that marks the error of its object as read once it has passed it on."""

    @wraps(original)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][hide_own_frames, error]
            sealed[wall.gi_running][_mark, self]
            raise
        if result is not None and isinstance(result, BaseException):
            _mark(self)
        return result

    return read


def _mark(holder: Any) -> None:
    entry = getattr(holder, "_ddpdoctor_error", None)
    if entry is not None:
        entry["read"] = 1
