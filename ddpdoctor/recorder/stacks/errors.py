"""Notes exceptions with the time at which they were raised, and how the script ended."""

from __future__ import annotations

import _thread
import os
import sys
import time

from .. import frames, imports
from ..state import guarded, here, sealed, wall
from ..wrappers import hide_own_frames, wraps
from . import error_details
from .error_details import frames_of, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple

    Key = Tuple[int, type, int]

MAX_NOTES = 40
MAX_STACK = 20
"""Frames of the main thread that are noted if another thread ends the process."""
MAX_THREADS_NOTED = 10
"""Uncaught exceptions of threads that are noted. A server may lose one thread per request."""
KEPT_WITHOUT_SPACE = 5
_RECORDER = (__package__ or "").rpartition(".")[0]
"""The recorder's package name. In a rank it is loaded by its path under a name of its own, elsewhere as a part of
ddpdoctor."""
_WORKER_TEXT = r'^\s*File "([^"\n]+)", line (\d+), in (\S+)'
_PASSED_ON = ("Original Traceback (most recent call last):", "terminated with the following error:")
_noted: Dict[Key, Optional[str]] = {}
"""By error: the recorded call that raised it. It belongs to one ring."""
_handled: Dict[Key, int] = {}
"""How many calls began while the main thread handled an error."""
MOST_CALLS_OF_HANDLER = 16
"""A handler that makes more is where the script trains (``except ImportError:`` around a fallback), so its error
explains no call. Our choice."""
_installed = False


def note_exception(error: BaseException, uncaught: bool, call: Optional[str] = None) -> None:
    """Write an exception to the journal. ``call`` names the recorded call that raised it.

    An error that the user's own code raised inside a recorded call (a model's forward) is not the call's failure.
    """
    ring = here.ring
    is_main = _thread.get_ident() == here.main_thread
    if ring is None or not _may_note(uncaught, is_main):
        return
    reason = error_details.reason_of(error, _own_rank(), raised_by_call, in_call=call is not None)
    error = reason.error
    text = text_of(error)
    passed_on = frames_in_text(text)
    raised_at = passed_on or reason.frames
    key = _key(error, text)
    if uncaught:
        call = _noted.get(key)
    elif key in _noted or any(frame["u"] for frame in raised_at):
        return
    _noted[key] = call
    entry = {
        "k": "raised",
        "type": type(error).__name__,
        "text": text[:2000],
        "at": time.monotonic_ns(),
        "main": int(is_main),
        "uncaught": int(uncaught),
        "call": call,
        "child": int(bool(passed_on)),
        "as": reason.passed_on,
        "ranks": reason.ranks,
        "frames": raised_at,
        "first": None if _trains_under(reason.first) else _brief(reason.first),
        "groups": _groups() if call else [],
        "memory": error_details.at_error(error, text),
        "reducer": _of_reducer(error, text),
    }
    if not ring.note(entry, vital=uncaught):
        entry.update(groups=[], text=text[:200], frames=raised_at[-KEPT_WITHOUT_SPACE:], first=None)
        ring.note(entry, vital=uncaught)


def _key(error: BaseException, text: str) -> Key:
    """Return what identifies an error. Its id alone does not, because the next error may get it."""
    return id(error), type(error), hash(text)


def was_noted(error: BaseException) -> bool:
    """Return whether an error was written to the journal."""
    return bool(_noted) and _key(error, text_of(error)) in _noted


def raised_by_call(error: BaseException) -> bool:
    """Return whether a recorded call has raised an error that was written to the journal."""
    return bool(_noted) and _noted.get(_key(error, text_of(error))) is not None


def _of_reducer(error: BaseException, text: str) -> Optional[Dict[str, Any]]:
    """Return what DDP's reducer complains about, or None if it did not raise the error or is not loaded."""
    reducer = sys.modules.get(_RECORDER + ".training.reducer")
    try:
        return reducer.complaint(error, text) if reducer is not None else None
    except Exception as failure:  # noqa: BLE001 - the recorder's wall: the error itself is still noted
        here.failed("reducer", failure)
        return None


def _own_rank() -> int:
    """Return this process's rank, or -1 before it has one. ``groups`` is loaded only with torch.distributed."""
    groups = sys.modules.get(_RECORDER + ".calls.groups")
    return int(groups.c10d.get_rank()) if groups is not None and groups.default() is not None else -1


def _may_note(uncaught: bool, is_main: bool) -> bool:
    """Return whether to note one more. A script may survive many errors and then end with the one that matters."""
    if uncaught and is_main:
        return True
    return len(_noted) < MAX_NOTES + (MAX_THREADS_NOTED if uncaught else 0)


def _groups() -> Any:
    """Return how far each group had got when a call failed, because later nobody can ask.

    The training thread reads only counters and asks no device, which could block or break the capture of a CUDA graph.
    """
    groups = sys.modules.get(_RECORDER + ".calls.groups")
    return groups.groups_now() if groups is not None else []


def handled_now() -> Optional[Dict[str, Any]]:
    """Return the error that the main thread is handling, for example in a ``finally`` of the script, or None."""
    handled: Dict[Optional[int], Any] = getattr(sys, "_current_exceptions", dict)()
    current = handled.get(here.main_thread)
    error = current[1] if isinstance(current, tuple) else current  # it is a tuple up to Python 3.11
    if error is None or _trains_under(error):
        return None
    reason = error_details.reason_of(error, _own_rank(), raised_by_call)
    found = _brief(reason.error)
    return found and dict(
        found, main=1, call=_noted.get(_key(reason.error, text_of(reason.error))), first=_brief(reason.first)
    )


@guarded("handled error")
def note_handled(error: Optional[BaseException], call_ns: int) -> None:
    """Write that the main thread begins a call at ``call_ns`` while it handles an error, and that error once."""
    ring = here.ring
    if ring is None or error is None:
        return
    key = _key(error, str(error))  # with its secrets hidden, it would cost 60 us for each call
    made = _handled.get(key, 0)
    if made >= MOST_CALLS_OF_HANDLER or (not made and len(_handled) >= MAX_NOTES):
        return
    _handled[key] = made + 1
    if not made:
        ring.note(dict(handled_now() or {}, k="handled"))
    ring.set("handling_ns", call_ns)


def _trains_under(error: Optional[BaseException]) -> bool:
    """Return whether the script handled an error for so many calls that it explains none."""
    return bool(_handled) and error is not None and _handled.get(_key(error, str(error)), 0) >= MOST_CALLS_OF_HANDLER


def _brief(error: Optional[BaseException]) -> Optional[Dict[str, Any]]:
    if error is None:
        return None
    text = text_of(error)
    passed_on = frames_in_text(text)
    raised_at = passed_on or frames_of(error.__traceback__)
    return {"type": type(error).__name__, "text": text[:2000], "child": int(bool(passed_on)), "frames": raised_at}


def frames_in_text(text: str) -> List[Dict[str, Any]]:
    """Return the frames of a child's traceback that torch put into an error's text; empty if there is none."""
    for mark in _PASSED_ON:
        if mark in text:
            import re

            found = re.findall(_WORKER_TEXT, text.rsplit(mark, 1)[1], re.MULTILINE)
            return frames.trim([frames.describe(file, int(line), function) for file, line, function in found])
    return []


@guarded("excepthook")
def saw_uncaught(error: Optional[BaseException]) -> None:
    """Note an exception that ends its process or thread, and remove our frames from its traceback."""
    if error is not None:
        hide_own_frames(error)
        linked = error.__cause__ or error.__context__
        if linked is not None:
            hide_own_frames(linked)
        note_exception(error, uncaught=True)


def install() -> None:
    """Chain to the hooks for uncaught exceptions and to the functions that end a process, once. A new ring begins."""
    global _installed
    _noted.clear()
    _handled.clear()
    if _installed:
        return
    _installed = True
    original = sys.excepthook

    def excepthook(kind: Any, error: Any, traceback: Any) -> None:
        try:
            saw_uncaught(error)
        finally:  # also if a signal handler raises now
            original(kind, error, error.__traceback__ if error is not None else traceback)

    # Both names: a library that finds them different thinks that another hook is installed, and skips its own.
    sys.__excepthook__ = sys.excepthook = wraps(original)(excepthook)
    _watch_exits()
    import atexit

    atexit.register(_exited)  # for a process that never has threads
    imports.when_there("threading", _watch_threads)


def _watch_exits() -> None:
    """Note the user's line that calls sys.exit or os._exit, because an exit leaves no traceback."""
    for module, name in ((sys, "exit"), (os, "_exit")):
        original = getattr(module, name)
        leave = _noting_exit(original, module is os)
        setattr(module, name, leave)
        home = sys.modules.get(getattr(original, "__module__", None) or "")
        if home is not None:  # os takes its function from posix, and it is pickled under that name
            setattr(home, name, leave)


def _noting_exit(original: Any, is_hard: bool) -> Any:
    @wraps(original)
    def leave(*args: Any, **kwargs: Any) -> Any:
        if is_hard and args and args[0]:
            _note_end_by_thread(sys._getframe(1))
        _note_exit(sys._getframe(1), args[0] if args else None)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][hide_own_frames, error]
            raise

    return leave


@guarded("end by a thread")
def _note_end_by_thread(caller: Any) -> None:
    """Write who ends the process, as watchdogs do, and where its main thread is: nothing can be asked later.

    An end by ``os.kill`` is not noted: a hook there would be in the stack that a handler of the signal gets.
    """
    if here.ring is not None and _thread.get_ident() != here.main_thread:
        stack = frames.describe_thread(here.main_thread) if here.main_thread is not None else []
        entry = {"k": "ended_by_thread", "at": time.monotonic_ns(), "frame": frames.describe_user(caller)}
        here.ring.note(dict(entry, stack=stack[-MAX_STACK:]), vital=True)


@guarded("exit")
def _note_exit(caller: Any, status: Any) -> None:
    place = frames.describe_user(caller)
    if here.ring is not None and place is not None:
        entry = {"k": "exit", "status": _status_text(status), "at": time.monotonic_ns(), "frame": place}
        handled_signal = _handled_signal(caller)
        if handled_signal:
            entry["signal"] = handled_signal
        here.ring.note(entry, vital=True)
    handled = sys.exc_info()[1]
    if handled is not None and status not in (None, 0):
        note_exception(handled, uncaught=True)  # the script logged it and then exits: it explains the exit status


def _status_text(status: Any) -> str:
    """Return an exit status as text. Scripts also end with a text, which may quote a URL or a key."""
    if status is None or isinstance(status, int):
        return repr(status)[:80]
    from ..storage.secrets import hide_in_text

    return hide_in_text(repr(status)[: error_details.MAX_TEXT])[:80]


def _handled_signal(frame: Any) -> str:
    """Return the signal whose handler of the script is on the stack, such as "SIGTERM"; empty if there is none."""
    module: Any = sys.modules.get("signal")
    names = {}
    for one in module.Signals if module is not None else ():
        handler = module.getsignal(one)
        names[id(getattr(getattr(handler, "__func__", handler), "__code__", handler))] = one.name
    while frame is not None:
        if id(frame.f_code) in names:
            return str(names[id(frame.f_code)])
        frame = frame.f_back
    return ""


def _watch_threads(threading: Any) -> None:
    """Note exceptions in threads, and the end of the script's own code, before the interpreter joins the threads."""
    original = threading.excepthook

    def excepthook(args: Any) -> None:
        try:
            if args.exc_type is not SystemExit:
                saw_uncaught(args.exc_value)
        finally:
            original(args)

    threading.excepthook = wraps(original)(excepthook)
    if hasattr(threading, "__excepthook__"):
        threading.__excepthook__ = threading.excepthook
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_main_ended)
        threading._register_atexit = _registering_first(register)


def _registering_first(register: Any) -> Any:
    """Register ours again after each other one, so that it runs first. An executor's waits for all of its threads."""

    def _register_atexit(*args: Any, **kwargs: Any) -> None:
        register(*args, **kwargs)
        register(_main_ended)

    return _register_atexit


@guarded("shutdown")
def _main_ended() -> None:
    ring = here.ring
    if ring is None or ring.get("main_ended_ns"):
        return
    ring.set("main_ended_ns", time.monotonic_ns())
    for action in here.on_end:
        action()
    error = getattr(sys, "last_value", None)
    if error is not None and not was_noted(error):
        note_exception(error, uncaught=True)


@guarded("atexit")
def _exited() -> None:
    _main_ended()
    if here.ring is not None:
        here.ring.set("exited_ns", time.monotonic_ns())
        from . import sampler

        sampler.stop()


def note_processes(process: Any) -> None:
    """Note exceptions in multiprocessing's children, which catch and print them. ``process`` is its module."""
    process.BaseProcess.run = noting_errors(process.BaseProcess.run)


def noting_errors(original: Any) -> Any:
    """Return a function with a note of the exception that ends it, because its caller catches all."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            sealed[wall.gi_running][saw_uncaught, error]
            raise

    return run
