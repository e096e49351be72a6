"""A thread that samples the main thread, and answers the watcher's requests for evidence.

While another thread holds the GIL, signals and fatal errors write stacks to our files, unless the script uses them:
SIGURG, ignored by default, and SIGTERM. faulthandler knows a file by its descriptor alone. A script may close all files
that it did not open and then open its own, and we must not write to those.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import faulthandler
import mmap
import os
import sys
import time

from . import frames
from .state import guarded, here, pass_on, raise_late
from .storage import ring_layout
from .storage.files import is_short_of_files, map_file, open_new, open_plain
from .storage.ring_writing import to_json
from .wrappers import around, wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple

    Line = Tuple[str, int, str]  # file, number, function

RANK_INTERVAL_S = 0.1
CHILD_INTERVAL_S = 0.4
LOOKS_APART_S = 0.3
CORE_TIME_NS = 900_000_000  # time between two readings of the main thread's core time
FIRST_CORE_TIME_NS = 200_000_000  # the same between the first two, so that jobs of less than a second have it too
# So many other threads are asked how long they waited for a core. Our choice: more take a thousandth of a core.
MAX_THREADS = 64
STOP_LIMIT_S = 0.05  # How long the end of a process waits for the thread. An idle thread needs a thousandth of that.
# Our choice: the default of 8 MiB counts in full under ``ulimit -v``. But when a query raises in torch's C++, 1 MiB is
# too little on CUDA builds (2.15), and the rank ended with SIGSEGV.
STACK_BYTES = 4 * 2**20
_IMPORTING = "<frozen importlib"
_MODULE_FILE = os.path.join("torch", "nn", "modules", "module.py")
# Functions remembered between two calls. The limit is for scripts that make functions at run time.
MAX_FUNCTIONS = 1024
_current: Optional[Sampler] = None


class LineTable:
    """Counts the user's lines at which the main thread is sampled, by phase. The rarest gives way in a full table."""

    def __init__(self) -> None:
        self.entries: Dict[Any, List[int]] = {}  # by line and phase: the entry in the ring's table, and the count

    def count(self, ring: Any, clock: Any, line: Line, caller: Optional[Line] = None) -> None:
        """Count one sample of a line, and of the line that called the model. A rank counts from its second step on."""
        if here.is_rank and (clock.waiting or not clock.number):
            return
        keys = [(line, clock.phase)]
        if caller is not None and caller != line:
            keys.append((caller, clock.phase + ring_layout.CALLS_MODULE))
        for key in keys:
            entry = self.entries.get(key)
            if entry is None:
                entry = [len(self.entries), 0]
                if len(self.entries) >= ring.line_capacity:
                    rarest = min(self.entries, key=lambda place: self.entries[place][1])
                    entry = [self.entries.pop(rarest)[0], 0]
                self.entries[key] = entry
            site = ring.known_site(key[0])
            if site is None:
                site = ring.intern_site(key[0], frames.describe(*key[0]))
            entry[1] += 1
            ring.line(entry[0], site, key[1], entry[1])


def _caller_of_module(stack: List[Tuple[Any, int]]) -> Optional[Line]:
    """Return the user's line that called the model or the library in which the user's innermost line ran, or None."""
    outer = [i for i, (code, _) in enumerate(stack) if code.co_filename.endswith(_MODULE_FILE)]
    start, own = len(stack), False
    for i, (code, _) in enumerate(stack):  # to the innermost frame of a library that called code of the user
        is_user = frames.is_user_file(code.co_filename)
        if own and not is_user:
            start = i
            break
        own = own or is_user
    start = outer[-1] if outer else start
    above = (frame for frame in stack[start:] if frames.is_user_file(frame[0].co_filename))
    code, line = next(above, (None, 0))
    return None if code is None else (code.co_filename, line, code.co_name)


def _core_time(path: str = "/proc/self/schedstat") -> Optional[Tuple[int, int]]:
    """Return a thread's time on a core and in a queue for one, in ns; None if not counted. It is the main thread's."""
    try:
        with open(path, "rb") as file:
            ran, waited = file.read().split()[:2]
    except (OSError, ValueError) as error:
        pass_on(error)
        return None
    return int(ran), int(waited)


class Sampler:
    """The state of the sampling thread of one process."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.wake, self.gone = _thread.allocate_lock(), _thread.allocate_lock()
        self.wake.acquire()
        self.gone.acquire()
        self.control: Any = None
        try:
            fd = open_plain(os.path.join(here.folder, "control"), os.O_RDONLY)
            try:
                self.control = map_file(fd, ring_layout.CONTROL_SIZE, writable=False)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            pass_on(error)
        self.answered = self.changes = self.calls_seen = self.modules = self.cores_due_ns = 0
        self.answer_path = ""
        self.lines = LineTable()
        self.last_function: Optional[Tuple[str, str, int]] = None
        self.seen: Set[Tuple[str, str, int]] = set()
        self.first_core_times: Optional[Tuple[int, ...]] = None

    def run(self) -> None:
        count = 0
        pid = os.getpid()
        while os.getpid() == pid and _current is self:
            # Uneven intervals, so that no loop of the user's runs in step with the samples.
            if self.rests(self.interval_s * (0.75 + count % 5 / 8)):
                break
            count += 1
            self.wake_up()
        self.gone.release()

    def rests(self, seconds: float) -> bool:
        ends = self.wake.acquire(True, seconds)
        if ends:
            self.wake.release()
        return ends

    def wake_up(self) -> None:
        """Do the work of one wake-up. Errors are caught, because a failure must not end the thread."""
        try:
            ring = here.ring
            if ring is None:
                return
            ring.set("heartbeat_ns", time.monotonic_ns())
            if here.late:
                raise_late()
            self.sample_main(ring)
            self.sample_imports(ring)
            self.sample_cores(ring)
            check()
            request = ring_layout.CELL.unpack_from(self.control, ring_layout.CONTROL_REQUEST)[0] if self.control else 0
            if request != self.answered:
                self.answered = request
                self.answer(request)
                self.modules = len(sys.modules)  # modules that an answer imports are no progress of the script
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed("sampler", error)

    def sample_main(self, ring: Any) -> None:
        stack = frames.of_thread(here.main_thread)
        code, line = next((frame for frame in stack if frames.is_user_file(frame[0].co_filename)), (None, 0))
        if code is None:
            return
        ring.place(code.co_filename, line, code.co_name)
        if here.clock is not None:
            caller = _caller_of_module(stack) if here.is_rank else None
            self.lines.count(ring, here.clock, (code.co_filename, line, code.co_name), caller)
        done = ring.get("calls_done")
        if done != self.calls_seen or len(self.seen) >= MAX_FUNCTIONS:
            self.calls_seen = done
            self.seen.clear()
        function = (code.co_filename, code.co_name, code.co_firstlineno)
        if function != self.last_function:
            self.last_function = function
            self.changes += 1
            ring.set("function_changes", self.changes)
            if function not in self.seen:
                self.seen.add(function)
                ring.set("new_functions", ring.get("new_functions") + 1)

    def sample_imports(self, ring: Any) -> None:
        """Count imports of the main thread as new functions. Other threads': torch imports when it dumps at a limit."""
        modules = len(sys.modules)
        if modules == self.modules:
            return
        self.modules = modules
        if any(code.co_filename.startswith(_IMPORTING) for code, _ in frames.of_thread(here.main_thread)):
            ring.set("new_functions", ring.get("new_functions") + 1)

    def sample_cores(self, ring: Any) -> None:
        """Write once a second how long the main thread had a core and waited for one, and the others waited."""
        now = time.monotonic_ns()
        if now < self.cores_due_ns or not here.is_rank or here.clock is None or not here.clock.number:
            return
        if is_short_of_files():  # in this thread, at a moment when the script may need the last one
            return
        self.cores_due_ns = now + (FIRST_CORE_TIME_NS if self.first_core_times is None else CORE_TIME_NS)
        counted = _core_time()
        if counted is None:
            return
        own = str(os.getpid())
        others = [thread for thread in os.listdir("/proc/self/task") if thread != own]
        times = [_core_time("/proc/self/task/%s/schedstat" % thread) for thread in others[:MAX_THREADS]]
        values = (now, *counted, sum(core[1] for core in times if core is not None))
        first = self.first_core_times = self.first_core_times or values
        for cell, value, start in zip(("trained_ns", "main_cpu_ns", "run_delay_ns", "others_delay_ns"), values, first):
            ring.set(cell, max(0, value - start))  # threads may have ended

    def answer(self, request: int) -> None:
        """Write two samples of all stacks, and what hooks know. torch is last: it may never return or free the GIL."""

        def described(by: Dict[str, Callable[[], Any]]) -> Dict[str, Any]:
            found: Dict[str, Any] = {}
            for name, describe in by.items():
                try:
                    found[name] = describe()
                except Exception as error:  # noqa: BLE001 - the recorder's wall
                    here.failed("evidence:" + name, error)
                    found[name] = None
            return found

        samples = [take_sample()]
        self.write(request, samples, {})
        extra = described(here.describers)
        self.rests(LOOKS_APART_S)
        samples.append(take_sample())
        self.write(request, samples, extra)
        if here.is_rank:  # in a rank's forked child the locks of torch and CUDA may be held forever
            extra.update(described(here.queries))
        self.write(request, samples, dict(extra, complete=1))

    def write(self, request: int, samples: List[Any], extra: Dict[str, Any]) -> None:
        """Put the answer in place whole, so that no reader sees half of it."""
        name = os.path.join(here.folder, "evidence", "%d-%d-%d.json" % (os.getpid(), here.ticks, request))
        body = dict(extra, looks=samples, pid=os.getpid(), request=request)
        write_quietly(name + ".part", to_json(body).encode())
        os.replace(name + ".part", name)
        if self.answer_path not in ("", name):  # a long job is asked many times, and only the last answer is read
            os.unlink(self.answer_path)
        self.answer_path = name


def write_quietly(path: str, data: bytes) -> None:
    """Write through a mapping: written bytes count as the script's progress. Blocks first: a full disk is fatal."""
    fd = open_new(path)
    try:
        os.posix_fallocate(fd, 0, len(data))
        mapped = mmap.mmap(fd, len(data))
        mapped[:] = data
        mapped.close()
    finally:
        os.close(fd)


def take_sample() -> Dict[str, Any]:
    """Return the stacks of all threads except our own. What a thread's event loop awaits follows its frames."""
    loops = sys.modules.get((__package__ or "") + ".waits")  # it is loaded where asyncio is
    threads = dict(getattr(sys.modules.get("threading"), "_active", ()))
    mine = _thread.get_ident()
    stacks = []
    for ident in list(sys._current_frames()):
        if ident == mine:
            continue
        thread = threads.get(ident)
        is_main = ident == here.main_thread
        awaited = (loops.awaited(ident) or []) if loops is not None and "asyncio.tasks" in sys.modules else []
        name = thread.name if thread is not None else "MainThread" if is_main else "thread %d" % ident
        daemon = int(thread.daemon if thread is not None else not is_main)
        lines = [*frames.describe_thread(ident), *awaited]
        stacks.append({"thread": name, "main": int(is_main), "daemon": daemon, "frames": lines})
    return {"at": time.monotonic_ns(), "stacks": stacks}


@guarded("sampler stop")
def stop() -> None:
    """End the thread first: pthread_exit would load a library, and abort where it cannot (chroot, no descriptor)."""
    global _current
    sampler, _current = _current, None
    here.kept.append(sampler)
    if sampler is not None:
        sampler.wake.release()
        sampler.gone.acquire(True, STOP_LIMIT_S)


@guarded("sampler start")
def start() -> None:
    global _current
    # The previous one is kept, also in a forked child: unmapping its file would close a descriptor that may be reused.
    here.kept.append(_current)
    _current = Sampler(RANK_INTERVAL_S if here.is_rank else CHILD_INTERVAL_S)
    if here.is_rank:
        register()
    # No threading.Thread: scripts that list their threads would see it, and threading should not be loaded for us.
    # It gets a small stack if no other thread runs that could start one with the same small stack.
    usual = None if _thread._count() else _thread.stack_size(STACK_BYTES)
    try:
        _thread.start_new_thread(guarded("sampler")(_current.run), ())
    finally:
        if usual is not None:
            _thread.stack_size(usual)


# The lowest descriptors of our files, the first that the limit allows. Our choice: below 1,024, the usual limit, as the
# kernel's table grows with the highest, and above those that a script soon reuses after closing all its files.
HIGH_NUMBERS = (1000, 240, 48)
_is_enabled = faulthandler.is_enabled
_enable = faulthandler.enable
_disable = faulthandler.disable
_register = faulthandler.register
_file: Optional[Tuple[int, int, int]] = None  # descriptor, device and inode of our file
_has_signal = False
_has_fatal = False
_fds: List[int] = []  # the descriptor of the file that SIGTERM writes to, if there is one


def register() -> None:
    global _file, _has_fatal
    if is_short_of_files() or not _signal_is_free():
        return
    fd = _open_high("dump", os.O_TRUNC)
    status = os.fstat(fd)
    _file = (fd, status.st_dev, status.st_ino)
    _register(_signal.SIGURG, file=fd, all_threads=True, chain=False)
    _note_signal(True)
    if not _is_enabled():
        _enable(file=fd, all_threads=True)
        _has_fatal = True

    # ``faulthandler`` answers a script as it would without us, and what the script enables replaces ours.
    def enabled(*unused: Any, **also_unused: Any) -> None:
        global _has_fatal
        _has_fatal = False

    @wraps(_disable)
    def disable() -> bool:
        return False if _has_fatal else bool(_disable())

    @wraps(_is_enabled)
    def is_enabled() -> bool:
        return bool(_is_enabled()) and not _has_fatal

    def registered(unused: Any, signum: Any, *also_unused: Any, **given: Any) -> None:
        if signum == _signal.SIGURG:
            _note_signal(False)

    @guarded("limit")
    def note_limit(unused: Any, timeout: Any = 0, *options: Any, **given: Any) -> None:
        """Publish when faulthandler's own thread will end the process, or 0. It leaves no trace of that."""
        exits = options[2] if len(options) > 2 else given.get("exit")
        if here.ring is not None:
            here.ring.set("own_limit_ns", time.monotonic_ns() + int(float(timeout) * 1e9) if exits else 0)

    for function in (disable, is_enabled):
        setattr(faulthandler, function.__name__, function)
    for name, then in (
        ("enable", enabled), ("register", registered), ("dump_traceback_later", note_limit),
        ("cancel_dump_traceback_later", note_limit),
    ):  # fmt: skip
        setattr(faulthandler, name, around(then=then)(getattr(faulthandler, name)))


def check() -> None:
    """Stop writing if the script has taken the signal for itself or closed our file."""
    if _file is None:
        return
    try:
        status = os.fstat(_file[0])
        is_there = (status.st_dev, status.st_ino) == _file[1:]
    except OSError as error:
        pass_on(error)
        is_there = False
    if not is_there:
        forget()
    elif _has_signal and not _signal_is_free():
        _forget_signal()


def forget() -> None:
    """Stop writing to the file, because it is another process's or no longer ours."""
    global _file, _has_fatal
    _forget_signal()
    if _has_fatal:
        _has_fatal = False
        _disable()
    _file = None


def _forget_signal() -> None:
    """Remove our handler, unless the script has replaced it. From now on dumps on request do not work."""
    if _has_signal and _signal_is_free():
        faulthandler.unregister(_signal.SIGURG)
    _note_signal(False)


def _note_signal(has_signal: bool) -> None:
    """Publish for the watcher whether SIGURG, sent to this process, writes stacks and does nothing else."""
    global _has_signal
    _has_signal = has_signal
    if here.ring is not None:
        here.ring.set("dumps_on_signal", int(has_signal))


def _signal_is_free() -> bool:
    return bool(_signal.getsignal(_signal.SIGURG) == _signal.SIG_DFL)


def _open_high(suffix: str, flags: int) -> int:
    import fcntl

    path = os.path.join(here.folder, "evidence", "%d-%d.%s" % (os.getpid(), here.ticks, suffix))
    fd = open_plain(path, os.O_CREAT | os.O_WRONLY | flags)
    for lowest in HIGH_NUMBERS:
        try:
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        except OSError as error:
            pass_on(error)
            continue
        os.close(fd)
        return high
    return fd


@guarded("dump on SIGTERM")
def register_sigterm() -> None:
    """Make SIGTERM write the main thread's stack, unless this process or its parent has decided what SIGTERM does."""
    # The handler is faulthandler's, in C. So Python's own table still says that nobody handles SIGTERM, a handler that
    # the script installs replaces it, and it works even if the main thread is blocked in a collective.
    if _fds or is_short_of_files() or _signal.getsignal(_signal.SIGTERM) != _signal.SIG_DFL:
        return
    _fds.append(_open_high("term", os.O_APPEND))

    @guarded("dump after fork")
    def forked() -> None:
        """Keep a forked child from writing to the parent's file. The handlers stay as the parent has set them."""
        if _fds:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _fds.pop(), inheritable=False)
            os.close(nowhere)

    os.register_at_fork(after_in_child=forked)
    # Only the main thread, which runs the handler: faulthandler must not read a stack that another thread changes.
    _register(_signal.SIGTERM, file=_fds[0], all_threads=False, chain=True)
