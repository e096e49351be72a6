"""The recorder of this process: its ring, its folder, and the guard that keeps our failures out of the user's code."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enum of each
import _thread
import os
import sys
import time
from itertools import chain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set

    from .storage.ring_writing import Ring

FOLDER_VARIABLE = "DDPDOCTOR_RUN"  # Names the run's folder on this host. Without it every hook returns at once.
# The pid of the rank that this process is, or that started it. It stays the same when a rank calls exec.
RANK_PID_VARIABLE = "DDPDOCTOR_RANK_PID"
AGENT_VARIABLE = "DDPDOCTOR_AGENT"  # the pid of torch's elastic agent: its direct children are ranks
# The pid of the rank that has joined a group: what it starts are no ranks of the job, whatever groups they make.
JOINED_VARIABLE = "DDPDOCTOR_JOINED"
MASTER_VARIABLE = "DDPDOCTOR_MASTER"  # the address of the store that the launcher's environment gave this rank
MAX_FAILURES = 20
# Variables in which launchers give a process its rank and the number of ranks.
_LAUNCH_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES",
)  # fmt: skip


class Recorder:
    """The state that all hooks share. Each process has one, ``here``."""

    def __init__(self) -> None:
        self.folder = os.environ.get(FOLDER_VARIABLE, "")
        self.ring: Optional[Ring] = None
        # Whether this process is recorded as a rank, or as one that belongs to a rank.
        self.is_rank = self.is_child = False
        self.ticks = self.failures = 0  # ``start_ticks``, and how many failures of ours there were
        threading = sys.modules.get("threading")
        # If nobody has imported ``threading`` yet, this is the main thread.
        self.main_thread = _thread.get_ident() if threading is None else threading.main_thread().ident
        self.on_start: List[Callable[[], None]] = []
        self.on_end: List[Callable[[], None]] = []  # called when the script's own code has ended
        # Functions that the hooks register to add to the evidence, by key. They must not call torch.
        self.describers: Dict[str, Callable[[], Any]] = {}
        # Likewise, functions that ask torch, and through it a device. They can hold the GIL, or never return.
        self.queries: Dict[str, Callable[[], Any]] = {}
        self.clock: Any = None  # The ``step_clock.StepClock``; None until the training hooks are loaded.
        self.in_backward = False  # whether the main thread is in a backward that runs our hooks
        # By thread, what came from outside where it could not be let go on: see ``shielded``. What came in a backward
        # is raised after it, or before the next: until then each hook of torch would have to hold it back again.
        self.late: Dict[Optional[int], List[BaseException]] = {}
        # Signals whose handler waits for the end of a backward: see ``wrappers.patch_signal``.
        self.waiting: List[int] = []
        # Mapped files that are no longer used. They stay mapped, because unmapping closes their file descriptors. A
        # script that closes all files it did not open may by then have the same descriptors for files of its own.
        self.kept: List[Any] = []

    def start(self, is_rank: bool) -> None:
        """Make the ring. If that fails, the process continues without one, and a note has the reason."""
        from . import frames
        from .storage import ring_layout
        from .storage.ring_writing import Ring

        self.ticks = start_ticks()
        self.is_rank, self.is_child = is_rank, not is_rank
        role = ring_layout.ROLE_RANK if is_rank else ring_layout.ROLE_CHILD
        shape = ring_layout.RANK_SHAPE if is_rank else ring_layout.CHILD_SHAPE
        try:
            ring = Ring(os.path.join(self.folder, "rings"), role, shape, os.getpid(), self.ticks)
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            pass_on(error)
            self.lost("no ring could be made: %s" % (getattr(error, "strerror", None) or error))
            return
        self.ring = ring
        # The rank that this process is or that it was started by, however far up; 0 if by none.
        owner = os.environ.get(JOINED_VARIABLE) or os.environ.get(RANK_PID_VARIABLE, "")
        env = {name: os.environ[name] for name in _LAUNCH_VARIABLES if name in os.environ}
        rank_pid = int(owner) if owner.isdigit() else 0
        roots = frames.STDLIB
        self.note("process", ppid=os.getppid(), rank_pid=rank_pid, main=self.main_thread, roots=roots, env=env)
        for action in self.on_start:
            action()

    def note(self, k: str, *, vital: bool = False, **fields: Any) -> bool:
        """Write a note to the journal, with the time. Return False without a ring, or if it is full."""
        return self.ring is not None and self.ring.note({"k": k, **fields, "at": time.monotonic_ns()}, vital=vital)

    @staticmethod
    def store_address() -> str:
        return "%s:%s" % (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))

    @staticmethod
    def is_below_trainer() -> bool:
        return os.environ.get(JOINED_VARIABLE, str(os.getpid())) != str(os.getpid())

    def promote(self) -> None:
        """Give a process that turned out to be a rank (under mp.spawn) the ring of a rank."""
        if not self.is_rank or self.ring is None:
            self._drop_ring()
            self.start(is_rank=True)

    def demote(self) -> None:
        """Remove the ring of a process that looked like a rank but turned out to start the ranks."""
        if self.ring is not None:
            self.is_rank = self.is_child = False
            self._drop_ring()

    def put_aside(self) -> Optional[Ring]:
        old, self.ring = self.ring, None
        self.kept.append(old)
        return old

    def _drop_ring(self) -> None:
        old = self.put_aside()
        if old is not None:
            try:
                old.remove()
            except OSError as error:  # the folder is gone
                pass_on(error)

    def lost(self, why: str) -> None:
        """Write a file with the reason why this rank is not recorded. Children write none: there may be thousands."""
        from .storage.files import write_at_once

        if self.is_child or not self.folder:
            return
        try:
            path = os.path.join(self.folder, "lost-%d-%d" % (os.getpid(), self.ticks))
            write_at_once(path, "%s\n%s" % (os.environ.get("RANK", ""), why), os.O_TRUNC)
        except OSError as error:
            pass_on(error)

    def failed(self, hook: str, error: BaseException) -> None:
        """Swallow our own failure, and note the first few. Raise others again: see ``pass_on``."""
        pass_on(error)
        self.failures += 1
        if self.failures > MAX_FAILURES:
            return
        try:
            from .storage.secrets import hide_in_text  # here, because it loads re

            text = "%s: %s" % (type(error).__name__, hide_in_text(" ".join(str(error)[:2000].split()))[:200])
            is_noted = False
            try:
                is_noted = self.note("defect", vital=True, hook=hook, error=text)
            except Exception as failure:  # noqa: BLE001 - the recorder's wall
                pass_on(failure)
            if not is_noted:
                self.lost("%s: %s" % (hook, text))
        except Exception as failure:  # noqa: BLE001 - the last guard: no failure of ours reaches training
            pass_on(failure)


def check_every() -> int:
    """Return the number of steps between checks of the replicas; 0 if consistency is not checked."""
    from .storage.files import is_short_of_files

    if is_short_of_files():
        return 0
    from .settings import read_settings

    return read_settings(os.environ).check_every


def start_ticks(pid: Any = "self") -> int:
    """Return when a process started, in clock ticks since boot. With the pid that identifies it uniquely."""
    try:
        with open("/proc/%s/stat" % pid, "rb") as stat:
            return int(stat.read().rsplit(b")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError) as error:
        pass_on(error)
        return 0


def pass_on(error: BaseException) -> None:
    """Raise an exception again unless our own code raised it, or something that our own code called."""
    # Python runs the script's signal handlers, and raises what another thread sends to this one, between any two
    # instructions of the main thread, so also between two of ours. Each ``except`` of the recorder that goes on calls
    # this, also one for a single class: a handler's TimeoutError is an OSError. Where a call of the script passes, the
    # ``except`` asks ``sealed`` instead.
    if not isinstance(error, Exception) or came_from_outside(error):
        raise error


_WITHOUT_TEXT = (MemoryError, StopIteration, StopAsyncIteration, AssertionError)  # C code raises them without a text


# The instruction of ``raise``, where no other thread's exception comes. ``opcode`` would take a file descriptor.
_RAISE = set(compile("raise", "", "exec").co_code[::2]) - set(compile("pass", "", "exec").co_code[::2])
_is_loading = False


def came_from_outside(error: BaseException) -> bool:
    """Return whether an exception's traceback shows that foreign code interrupted what ran."""
    # A signal handler or a trace function is given the frame that it interrupts. An exception that a thread sends has
    # no frame. Only its class is given, and Python makes it without a text.
    global _is_loading
    if _is_loading:  # our own import hook failed at the import below
        return False
    _is_loading = True
    try:
        from . import frames
    finally:
        _is_loading = False
    step = error.__traceback__
    interrupted: List[Any] = [step.tb_frame.f_back] if step is not None else []
    foreign = []
    last = step
    while step is not None:
        last, frame, step = step, step.tb_frame, step.tb_next
        if not frames.is_own_file(frame.f_code.co_filename):
            foreign.append(frame.f_code)
            values = list(frame.f_locals.values())
            given = [*values, *chain.from_iterable(value for value in values if type(value) is tuple)]
            if any(type(value) is type(frame) and value in interrupted for value in given):
                return True
        interrupted.append(frame)
    if last is None:
        return False
    if foreign:  # or the script's own signal handlers: functions, methods, objects, ``functools.partial``
        for handler in map(script_handler, {_signal.getsignal(number) for number in range(1, _signal.NSIG)}):
            inside = getattr(handler, "func", handler)  # functools.partial
            called = vars(type(inside)).get("__call__")  # an object
            if any(getattr(part, "__code__", None) is code for part in (inside, called) for code in foreign):
                return True
    if last.tb_frame.f_code.co_code[last.tb_lasti] in _RAISE:
        return False
    kind = type(error)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if kind.__module__ == "__main__" or (file and frames.is_user_file(file)):
        return True
    return not error.args and kind not in _WITHOUT_TEXT


def shielded(hook: str, action: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a C function that calls ``action`` with its argument, and out of which no exception comes.

    For places in which Python would only print it, or in which torch's C++ would end early because of it. Without us no
    Python code would run there, and a signal would wait. So an exception that is not ours is raised again as soon as
    code outside such functions runs. If there are several, each call of one of these functions raises the next. While
    another exception passes or is handled, it waits for the next call or for ``raise_late``: raised right away, it
    would surface in a ``finally`` of torch and replace the other one.
    The C function returns what ``action`` returned, or None after an exception.

    A function written in Python can be interrupted before its first instruction, where it has no ``try`` yet. A
    generator that is inside of one cannot. It must not be called while it runs.
    """

    def run(is_ending: Callable[[], bool] = sys.is_finalizing) -> Any:
        errors: List[BaseException] = []  # what came out of ``action``, and what interrupted us when we handled that
        result = None
        while True:
            try:
                while True:
                    try:
                        while errors:
                            error = errors[0]
                            if is_ending():
                                pass
                            elif isinstance(error, Exception) and not came_from_outside(error):
                                here.failed(hook, error)
                            else:
                                _send_again(error)
                            del errors[0]
                        while True:
                            late = here.late.get(_thread.get_ident()) if here.late else None
                            if late and here.in_backward and _thread.get_ident() == here.main_thread:
                                late = None
                            if late and sys.exc_info()[0] is None:
                                error = late[0]
                                sender, key = _sender(error, _thread.get_ident())
                                if late and late[0] is error:  # the sampler has not sent it meanwhile
                                    sender[key]  # Python does not look for signals until the caller has gone on
                                    del late[0]
                            result = action((yield result))
                    except GeneratorExit:
                        return
                    except BaseException as raised:  # noqa: BLE001 - the recorder's wall
                        errors, result = [*errors, raised], None
            except BaseException as raised:  # noqa: BLE001 - it came at the jump back to the inner ``try``
                errors, result = [*errors, raised], None

    running: Any = run()
    next(running)
    call: Callable[..., Any] = running.send
    walls.add(running.gi_code)
    return call


def _send_again(error: BaseException) -> None:
    """Keep an exception. ``shielded`` raises it in this thread after our function has returned."""
    late = here.late.setdefault(_thread.get_ident(), [])
    if all(error is not other for other in late):
        late.append(error)


def raise_late() -> None:
    """Raise in each thread what waits there, because it may never call us again. The sampler's thread does this."""
    for thread, late in list(here.late.items()):
        if thread and late and not (here.in_backward and thread == here.main_thread):
            error = late[0]
            sender, key = _sender(error, thread)
            if late and late[0] is error:
                sender[key]
                del late[0]


def _sender(error: BaseException, thread: int) -> Any:
    """Return an object and a key: ``object[key]`` makes a thread raise ``error`` where it next looks for signals."""
    import ctypes
    from functools import partial

    kind = type(error)
    known: Dict[Any, BaseException] = {}
    try:
        # Python makes the exception from a class. This one returns the exception that exists.
        again = type(kind.__name__, (kind,), {"__new__": known.get, "__module__": kind.__module__})
        known[again] = error
        send = ctypes.pythonapi.PyThreadState_SetAsyncExc
        by_class = partial(send, ctypes.c_ulong(thread))
        return type("Sender", (), {"__getitem__": staticmethod(by_class)})(), ctypes.py_object(again)
    except Exception as failure:  # noqa: BLE001 - the recorder's wall: a class that cannot be derived from
        here.failed("raise again", failure)
        return {None: None}, None


def guarded(hook: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make one of our functions harmless: if it raises, the error is recorded and swallowed, and it returns None."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not sealed[wall.gi_running][hook, error]:
                    raise
                return None

        walls.add(run.__code__)
        return run

    return decorate


here = Recorder()
walls: Set[Any] = set()  # the code that runs our hooks


def _answer(request: Any) -> Any:
    """Call a function with its arguments; or, for a hook and an error, swallow one that is ours and return whether."""
    if callable(request[0]):
        return request[0](*request[1:])
    if not isinstance(request[1], Exception) or came_from_outside(request[1]):
        return False
    here.failed(*request)
    return True


class _Inside:
    """What an interruption of ``sealed`` itself asks. What comes from outside there is raised once more, later."""

    def __getitem__(self, request: Any) -> Any:
        answer = _answer(request)
        if callable(request[0]) or answer:
            return answer
        _send_again(request[1])
        return True


_call_sealed: Any = shielded("wall", _answer)
# The generator behind ``sealed``. While it runs it cannot be called: ``wall.gi_running`` is the index of what can.
wall = _call_sealed.__self__
# Runs our code while an exception of the script passes through one of our wrappers, or where one may.
#
# If a second exception came in our ``except`` clause, it would replace the first, which the script would never see.
# Python looks for signals at the beginning of a function, after a call and at a jump back, but not after a
# subscription, and ``shielded`` raises what comes in our code once more, later. So a clause that lets an exception go
# on calls nothing:
#
# sealed[wall.gi_running][function, argument, ...] # what the function returns; None if it was interrupted if not
# sealed[wall.gi_running][hook, error]: raise # ``here.failed``, save that the clause itself raises
sealed: Any = (type("Sealed", (), {"__getitem__": _call_sealed})(), _Inside())


def script_handler(handler: Any) -> Any:
    """Return the handler that the script gave, of one that ``wrappers.patch_signal`` put around it."""
    return handler.__wrapped__ if hasattr(handler, "is_of_recorder") else handler


def run_waiting(frame: Any) -> None:
    """Call the handlers of signals that arrived in our hooks in a backward, as if they arrived now in this frame."""
    while here.waiting:
        number = here.waiting[0]
        del here.waiting[0]
        if number in here.waiting:  # Python runs a handler once for all signals of its number that wait
            continue
        handler = script_handler(_signal.getsignal(number))
        if callable(handler):
            handler(number, frame)
