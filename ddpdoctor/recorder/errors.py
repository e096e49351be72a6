"""Notes exceptions with the time, the memory, and the underlying error on this rank, and how the script ended."""

from __future__ import annotations

import _thread
import os
import sys
import time

from . import frames, hooks
from .state import guarded, here, pass_on, sealed, wall
from .storage import ring_layout
from .wrappers import around, hide_own_frames, wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Dict, List, Optional, Tuple

    Key = Tuple[int, type, int]
    Frames = List[Dict[str, Any]]

MAX_NOTES = 40
MAX_STACK = 20  # frames of the main thread that are noted if another thread ends the process
MAX_THREADS_NOTED = 10  # Uncaught exceptions of threads that are noted. A server may lose one thread per request.
KEPT_WITHOUT_SPACE = 5
# The recorder's package: in a rank it is loaded by its path under a name of its own.
_RECORDER = __package__ or ""
_WORKER_TEXT = r'^\s*File "([^"\n]+)", line (\d+), in (\S+)'
_PASSED_ON = ("Original Traceback (most recent call last):", "terminated with the following error:")
_noted: Dict[Key, Optional[str]] = {}  # By error: the recorded call that raised it. It belongs to one ring.
_handled: Dict[Key, int] = {}  # how many calls began while the main thread handled an error
# Our choice: a handler that makes more is where the script trains (a fallback), so its error explains no call.
MOST_CALLS_OF_HANDLER = 16
_installed = False


def note_exception(error: BaseException, uncaught: bool, call: Optional[str] = None) -> None:
    """Write an exception to the journal. ``call`` raised it, unless the user's own code did so inside of the call."""
    ring = here.ring
    is_main = _thread.get_ident() == here.main_thread
    # A script may survive many errors and then end with the one that matters.
    most = MAX_NOTES + (MAX_THREADS_NOTED if uncaught else 0)
    if ring is None or (len(_noted) >= most and not (uncaught and is_main)):
        return
    reason = reason_of(error, _own_rank(), raised_by_call, in_call=call is not None)
    error = reason.error
    text = text_of(error)
    passed_on = frames_in_text(text)
    raised_at = passed_on or reason.frames
    key = _key_of(error, text)
    if uncaught:
        call = _noted.get(key)
    elif key in _noted or any(frame["u"] for frame in raised_at):
        return
    _noted[key] = call
    complaint = None  # of DDP's reducer, if it is loaded and raised the error
    steps = sys.modules.get(_RECORDER + ".steps")
    try:
        complaint = steps.complaint(error, text) if steps is not None else None
    except Exception as failure:  # noqa: BLE001 - the recorder's wall: the error itself is still noted
        here.failed("reducer", failure)
    # Only counters are read, and no device is asked: that could block, or break the capture of a CUDA graph.
    groups = sys.modules.get(_RECORDER + ".groups") if call else None
    entry = {
        "k": "raised", "type": type(error).__name__, "text": text[:2000], "at": time.monotonic_ns(),
        "main": int(is_main), "uncaught": int(uncaught), "call": call, "child": int(bool(passed_on)),
        "as": reason.passed_on, "ranks": reason.ranks, "frames": raised_at,
        "first": None if _trains_under(reason.first) else _brief(reason.first),
        "groups": groups.groups_now() if groups is not None else [],  # how far each had got: later nobody can ask
        "memory": at_error(error, text), "reducer": complaint,
    }  # fmt: skip
    if not ring.note(entry, vital=uncaught):
        entry.update(groups=[], text=text[:200], frames=raised_at[-KEPT_WITHOUT_SPACE:], first=None)
        ring.note(entry, vital=uncaught)


def _key_of(error: BaseException, text: str) -> Key:
    """Return what identifies an error. Its id alone does not, because the next error may get it."""
    return id(error), type(error), hash(text)


def raised_by_call(error: BaseException) -> bool:
    """Return whether a recorded call has raised an error that was written to the journal."""
    return bool(_noted) and _noted.get(_key_of(error, text_of(error))) is not None


def _own_rank() -> int:
    """Return this process's rank, or -1 before it has one. ``groups`` is loaded only with torch.distributed."""
    groups = sys.modules.get(_RECORDER + ".groups")
    return int(groups.c10d.get_rank()) if groups is not None and groups.default() is not None else -1


def handled_now() -> Optional[Dict[str, Any]]:
    """Return the error that the main thread is handling, for example in a ``finally`` of the script, or None."""
    handled: Dict[Optional[int], Any] = getattr(sys, "_current_exceptions", dict)()
    current = handled.get(here.main_thread)
    error = current[1] if isinstance(current, tuple) else current  # it is a tuple up to Python 3.11
    if error is None or _trains_under(error):
        return None
    reason = reason_of(error, _own_rank(), raised_by_call)
    found = _brief(reason.error)
    call = _noted.get(_key_of(reason.error, text_of(reason.error)))
    return found and dict(found, main=1, call=call, first=_brief(reason.first))


@guarded("handled error")
def note_handled(error: Optional[BaseException], call_ns: int) -> None:
    """Write that the main thread begins a call at ``call_ns`` while it handles an error, and that error once."""
    ring = here.ring
    if ring is None or error is None:
        return
    key = _key_of(error, str(error))  # with its secrets hidden, it would cost 60 us for each call
    made = _handled.get(key, 0)
    if made >= MOST_CALLS_OF_HANDLER or (not made and len(_handled) >= MAX_NOTES):
        return
    _handled[key] = made + 1
    if not made:
        ring.note(dict(handled_now() or {}, k="handled"))
    ring.set("handling_ns", call_ns)


def _trains_under(error: Optional[BaseException]) -> bool:
    return bool(_handled) and error is not None and _handled.get(_key_of(error, str(error)), 0) >= MOST_CALLS_OF_HANDLER


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
            return frames.trim(read_frames(text.rsplit(mark, 1)[1]))
    return []


def read_frames(text: str) -> List[Dict[str, Any]]:
    import re

    lines = re.findall(_WORKER_TEXT, text, re.MULTILINE)
    return [frames.describe(file, int(line), function) for file, line, function in lines]


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
    # An exit leaves no traceback.
    for module, name in ((sys, "exit"), (os, "_exit")):
        function = getattr(module, name)
        leave = _noting_exit(function, module is os)
        setattr(module, name, leave)
        home = sys.modules.get(getattr(function, "__module__", None) or "")
        if home is not None:  # os takes its function from posix, and it is pickled under that name
            setattr(home, name, leave)
    import atexit

    @guarded("atexit")
    def exited() -> None:
        _main_ended()
        if here.ring is not None:
            here.ring.set("exited_ns", time.monotonic_ns())
            from . import sampler

            sampler.stop()

    atexit.register(exited)  # for a process that never has threads
    hooks.when_there("threading", _watch_threads)


def _noting_exit(original: Any, is_hard: bool) -> Any:
    @wraps(original)
    def leave(*args: Any, **kwargs: Any) -> Any:
        _note_exit(sys._getframe(1), args[0] if args else None, is_hard)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            sealed[wall.gi_running][hide_own_frames, error]
            raise

    return leave


@guarded("exit")
def _note_exit(caller: Any, status: Any, is_hard: bool) -> None:
    """Write the user's line that calls sys.exit or, if it is hard, os._exit. Such a status may be a text."""
    # If another thread ends the process, as watchdogs do, write where its main thread is: nothing can be asked later.
    # An end by ``os.kill`` is not noted: a hook there would be in the stack that a handler of the signal gets.
    place = frames.describe_user(caller)
    if is_hard and status and _thread.get_ident() != here.main_thread:
        stack = frames.describe_thread(here.main_thread) if here.main_thread is not None else []
        here.note("ended_by_thread", vital=True, frame=place, stack=stack[-MAX_STACK:])
    if here.ring is not None and place is not None:
        text = repr(status)[:MAX_TEXT]
        if status is not None and not isinstance(status, int):  # it may quote a URL or a key
            from .storage.secrets import hide_in_text

            text = hide_in_text(text)
        # The signal whose handler of the script is on the stack.
        module: Any = sys.modules.get("signal")
        names = {}
        for signal in module.Signals if module is not None else ():
            handler = module.getsignal(signal)
            names[id(getattr(getattr(handler, "__func__", handler), "__code__", handler))] = str(signal.name)
        running = [names[id(frame.f_code)] for frame in frames.outward(caller) if id(frame.f_code) in names]
        given = {"signal": running[0]} if running else {}
        here.note("exit", vital=True, status=text[:80], frame=place, **given)
    handled = sys.exc_info()[1]
    if handled is not None and status not in (None, 0):
        note_exception(handled, uncaught=True)  # the script logged it and then exits: it explains the exit status


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
    if register is None:
        return

    def _register_atexit(*args: Any, **kwargs: Any) -> None:
        register(*args, **kwargs)
        register(_main_ended)  # ours again, so that it runs first: an executor's waits for all of its threads

    register(_main_ended)
    threading._register_atexit = _register_atexit


@guarded("shutdown")
def _main_ended() -> None:
    ring = here.ring
    if ring is None or ring.get("main_ended_ns"):
        return
    ring.set("main_ended_ns", time.monotonic_ns())
    for action in here.on_end:
        action()
    error = getattr(sys, "last_value", None)
    if error is not None and not (_noted and _key_of(error, text_of(error)) in _noted):
        note_exception(error, uncaught=True)


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


# Children other than ranks whose bad end is noted. Our choice: terminating a pool ends all of its workers badly.
MAX_BAD_ENDS = 64
_bad_ends = 0


def patch_popen(module: Any) -> None:
    """Note how children of multiprocessing ended. Only their parent learns that."""

    @guarded("child ends")
    def polled(child: Any) -> None:
        """Note the end of a child that was a rank, and the first few bad ends of others, which may be thousands."""
        global _bad_ends
        pid, code = child.pid, child.returncode
        if here.ring is None or code is None:
            return
        rings = os.path.join(here.folder, "rings")
        own = [os.path.join(rings, name) for name in os.listdir(rings) if name.startswith("%d-" % pid)]
        if not any(os.path.getsize(path) == ring_layout.RANK_SHAPE.total_bytes for path in own):  # it was no rank
            _bad_ends += code != 0
            if code == 0 or _bad_ends > MAX_BAD_ENDS:
                return
        here.note("child_end", pid=pid, code=code)

    running = around(before=lambda child, *_, **also: child if child.returncode is None else None, last=polled)
    module.Popen.poll = running(module.Popen.poll)


# torch says "CUDA out of memory", "can't allocate memory", "unable to allocate shared memory(shm) for file", "unable to
# write to file </torch_...>: No space left on device", "DataLoader worker (pid 7) is killed by signal: Bus error".
WORDS = (
    "out of memory", "allocate memory", "shared memory", "shm", "No space left on device", "is killed by signal",
    "Bus error", "bad_alloc",
)  # fmt: skip
SHARED = "/dev/shm"  # noqa: S108 - read, not written to
MOST_DEVICES = 16


def at_error(error: BaseException, text: str) -> Optional[Dict[str, Any]]:
    """Return the memory figures, or None if the error is not about memory. Must not raise: the error is noted."""
    if not isinstance(error, MemoryError) and not any(word in text for word in WORDS):
        return None

    def status(name: str) -> int:
        with open("/proc/self/status", "rb") as file:
            values = (int(line.split()[1]) * 1024 for line in file if line.startswith(name.encode() + b":"))
            return next(values, 0)

    def address_space() -> Optional[List[int]]:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else [limit, status("VmSize")]

    def shared() -> Optional[List[int]]:
        stat = os.statvfs(SHARED)
        total = stat.f_frsize * stat.f_blocks
        return [total, total - stat.f_frsize * stat.f_bavail] if total else None

    def devices() -> List[List[int]]:
        """Return the numbers that torch's allocator keeps for each GPU. The device, which may hang, is not asked."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return []
        asked = (cuda.memory_allocated, cuda.max_memory_allocated, cuda.memory_reserved, cuda.max_memory_reserved)
        numbers = [[i, *(ask(i) for ask in asked)] for i in range(min(cuda.device_count(), MOST_DEVICES))]
        return [row for row in numbers if row[4]]

    found = {}
    for name, read in (
        ("resident", lambda: [status("VmRSS"), status("VmHWM")]), ("address_space", address_space),
        ("shared_memory", shared), ("devices", devices),
    ):  # fmt: skip
        try:
            found[name] = read()
        except Exception as failure:  # noqa: BLE001 - memory is short, and torch may be in any state
            pass_on(failure)
            found[name] = None
    return found


MAX_TEXT = 65536  # Characters of an error's text that are read. Our choice: a child's whole traceback is a tenth of it.


def text_of(error: BaseException) -> str:
    """Return an error's text without secrets. A failed download, for example, quotes its URL."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - the script's own class may fail here
        pass_on(failure)
        return "(its text could not be had)"
    from .storage.secrets import hide_in_text  # here, because it loads re

    return hide_in_text(text[:MAX_TEXT])


def frames_of(traceback: Optional[TracebackType]) -> List[Dict[str, Any]]:
    """Return the frames of a traceback, outermost first, without the recorder's own."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not frames.is_own_file(code.co_filename):
            found.append(frames.describe(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return frames.trim(found)


MAX_LINKS = 8  # Length of the chain of causes that is followed. Our choice.


class ErrorReason:
    """An error, where it was raised, and which ranks it concerns."""

    __slots__ = ("error", "first", "frames", "passed_on", "ranks")

    def __init__(self, error: BaseException, raised_at: Frames) -> None:
        self.error = error
        self.frames = raised_at
        self.passed_on = ""  # the type of the outer error that this one caused; empty if there is none
        self.ranks: List[int] = []  # the ranks whose errors the outer error collects; empty if it is no collection
        self.first: Optional[BaseException] = None  # the earliest error of the script's own that this followed from


def reason_of(error: BaseException, rank: int, raised_by_call: Any, in_call: bool = False) -> ErrorReason:
    """Return the error on this rank that caused ``error``, or itself. ``in_call``: a recorded call raises it now."""
    outer = type(error).__name__
    found = ErrorReason(error, frames_of(error.__traceback__))
    failures = getattr(error, "failures", None)
    if outer == "CheckpointException" and isinstance(failures, dict):  # ``torch.distributed.checkpoint`` collects them
        pairs = {rank: pair for rank, pair in failures.items() if isinstance(rank, int) and isinstance(pair, tuple)}
        reported = {rank: pair for rank, pair in pairs.items() if len(pair) == 2 and isinstance(pair[0], BaseException)}
        found.ranks = sorted(reported)
        if rank in reported:
            own, summary = reported[rank]
            found.error, found.passed_on = own, outer
            inner_frames = [frames.describe(f.filename, f.lineno or 0, f.name) for f in summary]
            found.frames = frames.trim(found.frames + inner_frames)
    for _ in range(MAX_LINKS):
        if in_call or raised_by_call(found.error):
            break
        context = found.error.__context__
        cause = found.error.__cause__ or (context if context is not None and raised_by_call(context) else None)
        if cause is None:
            break
        raised_at = frames_of(cause.__traceback__)
        if not raised_by_call(cause):
            by_script = bool(found.frames) and found.frames[-1]["u"]
            if by_script or not any(frame["u"] for frame in raised_at):
                break
        found.error, found.frames, found.passed_on = cause, frames.trim(found.frames + raised_at), outer
    # An error followed from its cause, or the first error of a group. If a call raised it in a ``finally`` or an
    # ``except``, or if it is an exit from there, it followed from what the rank was handling.
    step: Optional[BaseException] = found.error
    for _ in range(MAX_LINKS):
        if step is None:
            break
        follows = in_call or raised_by_call(step) or isinstance(step, SystemExit)
        is_group = any(kind.__name__ == "BaseExceptionGroup" for kind in type(step).__mro__)
        inner = next(iter(step.exceptions), None) if is_group else None  # type: ignore[attr-defined]
        step, in_call = step.__cause__ or inner or (step.__context__ if follows else None), False
        is_error = isinstance(step, Exception) and not isinstance(step, StopIteration) and not raised_by_call(step)
        if step is not None and is_error and any(frame["u"] for frame in frames_of(step.__traceback__)):
            found.first = step
    return found
