"""Describes a wait by what the rank's stack shows but the kernel does not, and by work that is not on its stack.

The stack of a waiting asyncio loop shows only ``select``; the user's line is in the coroutine that the main task runs.
An error in a task that is not awaited, or in a pool call whose result is never read, is printed late or never.
"""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_right
from collections import deque

from . import frames
from .errors import frames_of, read_frames, text_of
from .state import MASTER_VARIABLE, guarded, here
from .wrappers import around

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, Deque, Dict, Iterator, List, Optional

    Frames = List[Dict[str, Any]]

# By the end of the source file's path: the attribute of ``self`` with the lock's path. A baton is taken by creating its
# file, and stays taken if that process dies. The others request a kernel lock again and again.
LOOPS = {
    "/torch/utils/file_baton.py": "lock_file_path",
    "/filelock/_api.py": "lock_file",
    "/fasteners/process_lock.py": "path",
    "/portalocker/utils.py": "filename",
}
MARKERS = ("FileBaton", "SoftFileLock")  # classes for which the existence of the file is the lock
LOOKS = frozenset({"exists", "lexists", "isfile", "is_file", "open", "stat", "access", "listdir", "glob"})
MOST_PATH = 4096
FILE = "/torch/distributed/rendezvous.py"
MAKES_STORE = "_create_c10d_store"
METHODS = {"_env_rendezvous_handler": "env://", "_tcp_rendezvous_handler": "tcp://"}
DEEPEST = 40
MOST_CODES = 2000  # how many of the user's functions are searched for the line that set an address


def lock() -> Optional[Dict[str, Any]]:
    """Return the lock file that the main thread polls for, or None if it is in no such loop."""
    for depth, (code, _) in enumerate(frames.of_thread(here.main_thread)[:DEEPEST]):
        attribute = next((name for end, name in LOOPS.items() if code.co_filename.endswith(end)), None)
        if attribute is not None:
            owner = frames.locals_of(here.main_thread, depth, code).get("self")
            path: Any = getattr(owner, attribute, None)
            if path:
                marker = any(kind.__name__ in MARKERS for kind in type(owner).__mro__)
                return {"path": os.path.abspath(os.fspath(path)), "kind": "marker" if marker else "kernel"}
        elif depth == 0 and frames.is_user_file(code.co_filename):
            return _of_own_loop(code)
    return None


def _of_own_loop(code: CodeType) -> Optional[Dict[str, Any]]:
    if "sleep" not in code.co_names or not LOOKS.intersection(code.co_names):
        return None
    for value in (*frames.values_of(here.main_thread, code), *code.co_consts):
        path = str(value) if isinstance(value, str) or type(value).__module__.startswith("pathlib") else ""
        name = os.path.basename(path).lower() if len(path) < MOST_PATH else ""
        at = name.find("lock")
        if (name.endswith(".lck") or (at >= 0 and not name[at - 1 : at].isalpha())) and os.path.isfile(path):
            return {"path": os.path.abspath(path), "kind": "own-loop"}
    return None


def store() -> Optional[Dict[str, Any]]:
    stack = frames.of_thread(here.main_thread)[:DEEPEST]
    for depth, (code, _) in enumerate(stack):
        if code.co_name == MAKES_STORE and code.co_filename.endswith(FILE):
            given = frames.locals_of(here.main_thread, depth, code)
            if "port" not in given:
                continue
            method = next((METHODS[code.co_name] for code, _ in stack if code.co_name in METHODS), "")
            return {
                "host": str(given.get("hostname")), "port": int(given["port"]), "rank": int(given.get("rank", -1)),
                "method": method, "agent": int(os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"),
                "given": os.environ.get(MASTER_VARIABLE),
                "set": _setting_line([code for code, _ in stack]) if method == "env://" else None,
            }  # fmt: skip
    return None


def _setting_line(stack: List[CodeType]) -> Optional[Dict[str, Any]]:
    """Return the user's line that replaced the launcher's address, or None if none did or it is not found."""
    host, _, port = os.environ.get(MASTER_VARIABLE, "").rpartition(":")
    given = {"MASTER_PORT": port, "MASTER_ADDR": host}
    names = [name for name, value in given.items() if value and os.environ.get(name) != value]
    if not names:
        return None
    for count, code in enumerate(_codes(stack)):
        line = _assigns(code, names)
        if line:
            return frames.describe(code.co_filename, line, code.co_name)
        if count > MOST_CODES:
            break
    return None


def _codes(stack: List[CodeType]) -> Iterator[CodeType]:
    def nested(code: Any) -> Iterator[CodeType]:
        if hasattr(code, "co_consts"):
            yield code
            for constant in code.co_consts:
                yield from nested(constant)

    for code in stack:
        if frames.is_user_file(code.co_filename):
            yield from nested(code)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and frames.is_user_file(file):
            for value in list(vars(module).values()):
                yield from nested(getattr(value, "__code__", None))


def _assigns(code: CodeType, names: List[str]) -> int:
    """Return the line of ``os.environ[NAME] = ...``, or of an ``update`` with that name; 0 if there is none."""
    if not any(_holds(constant, names) for constant in code.co_consts):
        return 0
    import dis  # torch has loaded it

    steps = list(dis.get_instructions(code))
    starts = [start for start in dis.findlinestarts(code) if start[1]]
    for step, following in zip(steps, steps[1:]):  # noqa: RUF007 - Python 3.8 has no pairwise
        value = code.co_consts[step.arg or 0] if step.opname == "KW_NAMES" else step.argval  # 3.11: dis gives no argval
        if _holds(value, names) and (following.opname == "STORE_SUBSCR" or "update" in code.co_names):
            at = bisect_right(starts, (step.offset, sys.maxsize)) - 1
            return starts[at][1] or 0 if at >= 0 else 0
    return 0


def _holds(value: Any, names: List[str]) -> bool:
    return value in names if isinstance(value, str) else isinstance(value, tuple) and any(n in value for n in names)


MOST_TASKS = 8  # Links from a task to the task that it awaits. Our choice.
MOST_AWAITS = 60
MOST_KEPT = 16  # Errors of tasks and calls that are kept. Our choice: a server may lose one for each request.
TRIES = 3
# A thread whose innermost frame is in one of these runs an event loop that has nothing to do.
_IN_LOOP = ("/selectors.py", "/asyncio/", "/uvloop/")
# By function of asyncio: its variable with the task that it runs, if there is one.
_RUNNERS = {"run": "task", "run_until_complete": "future", "run_forever": ""}
# The errors of calls in pools, with whether somebody has read them, and of tasks that are gone.
_kept: Deque[Dict[str, Any]] = deque(maxlen=MOST_KEPT)


@guarded("awaited line")
def awaited(thread: int) -> Frames:
    """Return the frames of the coroutines that a thread's event loop waits for, outermost first."""
    # They belong below the frames of the thread itself. The list is empty if it runs no loop, or the loop is at work. A
    # loop that runs until it is stopped waits for its oldest task that no other task awaits.
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
    inner = [id(future) for task in tasks for future in _awaited_by(task, None)]
    tasks.sort(key=lambda task: (len(task.get_name()), task.get_name()))  # Task-9 before Task-10
    return next((_frames_of_task(task) for task in tasks if id(task) not in inner), [])


def _frames_of_task(task: Any) -> Frames:
    found: Frames = []
    seen: List[int] = []
    while task is not None and len(seen) < MOST_TASKS and id(task) not in seen:
        seen.append(id(task))
        step = getattr(task, "get_coro", lambda: None)()
        last = None
        for _ in range(MOST_AWAITS):
            held = (getattr(step, name, None) for name in ("cr_frame", "gi_frame", "ag_frame"))
            frame = next(filter(None, held), None)
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
    for candidate in candidates:
        if candidate is not None and candidate is not task and hasattr(candidate, "get_coro") and not candidate.done():
            yield candidate


def lost() -> List[Dict[str, Any]]:
    found = [dict(entry) for entry in list(_kept) if not entry["read"]]
    tasks = sys.modules.get("asyncio.tasks")
    for task in _all_tasks(tasks) if tasks is not None else ():
        if task.done() and not task.cancelled() and getattr(task, "_log_traceback", False):
            error = getattr(task, "_exception", None)
            if error is not None:
                found.append(_entry("task", task, error))
    return found[-MOST_KEPT:]


def _all_tasks(module: Any) -> List[Any]:
    """Return all tasks that are still held, also those that are done; ``asyncio.all_tasks`` leaves those out."""
    for _ in range(TRIES):
        try:
            if sys.version_info >= (3, 14):  # tasks that are done are in no list
                import gc

                return [task for task in gc.get_objects() if type(task) is module.Task]
            known: Any = getattr(module, "_scheduled_tasks", None) or getattr(module, "_all_tasks", ())
            return list(known)
        except RuntimeError:  # a task was made meanwhile
            continue
    return []


def _entry(who: str, task: Any, error: BaseException) -> Dict[str, Any]:
    in_process = type(error.__cause__).__name__ in ("_RemoteTraceback", "RemoteTraceback")  # of a pool
    raised_at = read_frames(str(error.__cause__)) if in_process else frames_of(error.__traceback__)
    return {
        "who": who, "name": str(task.get_name())[:80] if hasattr(task, "get_name") else "",
        "type": type(error).__name__, "text": text_of(error)[:2000], "at": time.monotonic_ns(),
        "frames": raised_at, "read": 0,
    }  # fmt: skip


def patch_loop(module: Any) -> None:
    """Patch asyncio.base_events: keep errors of callbacks and gone tasks, which the loop prints before it continues."""
    loop = module.BaseEventLoop

    @guarded("task error")
    def keep(unused: Any, context: Any) -> None:
        error, task = context.get("exception"), context.get("task") or context.get("future")
        if error is not None and here.ring is not None:
            _kept.append(_entry("task", task, error))

    loop.call_exception_handler = around(before=keep)(loop.call_exception_handler)


def patch_futures(module: Any) -> None:
    _patch(module.Future, "set_exception", ("result", "exception"), lambda future, exception: exception)


def patch_pool(module: Any) -> None:
    _patch(module.ApplyResult, "_set", ("get",), lambda result, i, obj: None if obj[0] else obj[1])


def _patch(owner: Any, setter: str, readers: Any, error_of: Any) -> None:
    @guarded("pool error")
    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        error = error_of(self, *args, **kwargs)
        if error is not None and here.ring is not None:
            entry = _entry("call", None, error)
            _kept.append(entry)
            self._ddpdoctor_error = entry

    def mark(holder: Any) -> None:
        entry = getattr(holder, "_ddpdoctor_error", None)
        if entry is not None:
            entry["read"] = 1

    def passed(result: Any, holder: Any, *unused: Any, **also_unused: Any) -> None:
        if isinstance(result, BaseException):
            mark(holder)

    setattr(owner, setter, around(before=keep)(getattr(owner, setter)))
    for name in readers:
        setattr(owner, name, around(then=passed, failed=mark)(getattr(owner, name)))
