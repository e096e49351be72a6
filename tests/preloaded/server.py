"""The server: loads torch, hides all that was loaded from imports to come, and forks into each program asked for.

It runs as a compiled file whose name says <frozen runpy>, so that nobody takes its frames for those of a user's script.
"""

import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import itertools
import os
import pickle
import pkgutil
import platform
import runpy
import signal
import site
import socket
import sys
import weakref
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

STARTED_WITH = frozenset(sys.builtin_module_names) | set(sys.modules)
PRELOADED = ("torch", "torch.distributed.run", "torch.utils.data.distributed", "torch._dynamo")
OURS = ("ddpdoctor.cli", "ddpdoctor.launch", "ddpdoctor.diagnose", "ddpdoctor.report")
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT = 0x8000
PR_SET_NAME = 15
FIRST_DESCRIPTOR = 200
"""Ours lie above those that a program would get."""
C = ctypes.CDLL(None)

hidden = {}
"""By name, each module that was loaded here. A program that imports one gets it as if it loaded it itself."""
as_loaded = {}
"""What each of them had then."""
imported_by = {}
"""Which modules the code of each has imported, in order."""
lazily_imported = []
overwritten = {}
"""By module, the names of its submodules that it has given to something else, as ``from .spawn import spawn`` does."""
loaders = {}
executed = set()
changed = set()
"""Modules that have imported what a hook had replaced. Others import it from them."""
kept = []


class Restored:
    """Gives a module that is loaded already, after what its code imports, in the order in which it does."""

    def __init__(self, module, spec):
        self.module, self.spec = module, spec

    def __getattr__(self, name):
        return getattr(self.spec.loader, name)

    def create_module(self, _spec):
        return self.module

    def exec_module(self, module):
        vars(module)["__spec__"] = self.spec
        replaced = {}
        for name in imported_by.get(self.spec.name, ()):
            if name not in sys.modules:
                restore(name)
            if name in changed or (name in loaders and "exec_module" in vars(loaders[name])):  # a hook stands before it
                replaced.update(replaced_in(name))
        # `from a import b` runs after `a` was patched, and takes the place of a module `b`. The rest is there.
        own = self.spec.name
        for name in as_loaded[own] if replaced or own in executed else overwritten.get(own, ()):
            value = as_loaded[own][name]
            vars(module)[name] = replaced.get(id(value), value)
            if id(value) in replaced:
                changed.add(own)
        executed.add(own)


def restore(name):
    if name in hidden and as_loaded[name].get("__spec__") is None:  # made by code, and not imported
        sys.modules[name] = hidden[name]
    else:
        importlib.import_module(name)


def replaced_in(name):
    """Return what hooks have put in the place of what a module had when it was loaded, by what it was."""
    now = vars(hidden[name])
    return {id(old): now[key] for key, old in as_loaded[name].items() if key in now and now[key] is not old}


def load():
    """Import what is wanted, and note which module imports which others."""
    real_import = builtins.__import__

    def noting(name, scope=None, places=None, fromlist=(), level=0):
        found = real_import(name, scope, places, fromlist, level)
        note_import(scope or {}, name, fromlist or (), level)
        return found

    builtins.__import__ = noting
    packages = [importlib.import_module(name) for name in OURS]
    ours = [one.name for package in packages for one in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    for name in (*PRELOADED, *ours):
        before = set(sys.modules)
        importlib.import_module(name)
        new = [one for one in sys.modules if one not in before]
        imported_by.setdefault(name, {}).update((one, None) for one in new)
        lazily_imported.extend(one for one in new if one.rpartition(".")[0] in before)
    builtins.__import__ = real_import


def note_import(scope, name, fromlist, level):
    importer = scope.get("__name__")
    if level:
        base = (scope.get("__package__") or importer).rsplit(".", level - 1)[0]
        name = f"{base}.{name}" if name else base
    noted = imported_by.setdefault(importer, {})
    noted.update((package, None) for package in itertools.accumulate(name.split("."), "{}.{}".format))
    noted.update((f"{name}.{one}", None) for one in fromlist if f"{name}.{one}" in sys.modules)


def hide():
    """Make it so that nothing was imported, and that what was is found."""
    for name in [name for name in sys.modules if name not in STARTED_WITH]:
        hidden[name] = sys.modules.pop(name)
    for name in lazily_imported:  # `torch._dynamo` is imported by whoever first says so
        parent, _, child = name.rpartition(".")
        if parent in hidden:
            vars(hidden[parent]).pop(child, None)
    hidden["tempfile"].tempdir = None  # it is found once, from the environment
    as_loaded.update((name, dict(vars(module))) for name, module in hidden.items())
    for name, module in hidden.items():
        parent, _, child = name.rpartition(".")
        if as_loaded.get(parent, {}).get(child, module) is not module:
            overwritten.setdefault(parent, []).append(child)
    for ours in (hidden, as_loaded, imported_by):  # their ends are no part of a program's end
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(ours))
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    real_find = PathFinder.find_spec

    def find_spec(_finder, name, path=None, target=None):
        return spec_of(name) if name in hidden else real_find(name, path, target)

    PathFinder.find_spec = classmethod(find_spec)


def spec_of(name):
    old = as_loaded[name].get("__spec__")
    loaders[name] = Restored(hidden[name], old)
    spec = ModuleSpec(name, loaders[name], origin=getattr(old, "origin", None))
    spec.submodule_search_locations = getattr(old, "submodule_search_locations", None)
    spec.has_location = getattr(old, "has_location", False)
    spec.cached = getattr(old, "cached", None)
    return spec


def serve(connection):
    """Fork for each request; return in the new process."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 18, 8)
        if not message:
            os._exit(0)
        pid = fork_sibling()
        if pid == 0:
            return pickle.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def fork_sibling():
    """Fork a process whose parent is the parent of this one."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = C.syscall(CLONE[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        own_id.value = os.getpid()
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def find_own_id():
    """Return where the C library keeps the id of the thread. It writes it in its fork, which is not what is used."""
    C.pthread_self.restype = ctypes.c_ulong
    words = (ctypes.c_int.from_address(C.pthread_self() + at) for at in range(0, 2304, 4))
    return next(word for word in words if word.value == os.getpid())


def fork_server(connection):
    """Leave a server behind for what this process starts; return the socket to it, and None in that server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.dup2(theirs.fileno(), connection.fileno(), inheritable=False)
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, 1024)
        return None
    theirs.close()
    return lift(ours)


def lift(connection):
    """Return a socket under a descriptor that is out of the way."""
    number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    connection.close()
    return socket.socket(fileno=number)


def become(connection, request, descriptors):
    """Make this process what a new Python is when it has started; return what it is to run.

    None where it has become a further server.
    """
    words, environment = request["words"], request["environment"]
    if request["host"]:
        enter_host(request["host"])
    unbuffered = words[1] == "-u"
    program = words[1 + unbuffered :]
    if request["session"]:
        os.setsid()
    if "RANK" not in environment or program[0] == "-m":  # it may start others
        further = fork_server(connection)
        if further is None:
            return None
        kept.append(asking.Server(further, ENVIRONMENT).lent())
        kept[-1].__enter__()
    *streams, go = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    if not os.read(go, 8):
        os._exit(127)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.close()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(environment)
    if "TORCH_CPP_LOG_LEVEL" in environment:
        set_log_level()
    show(words, environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = program if program[0] != "-m" else ["-m", *program[2:]]
    sys.orig_argv[:] = words
    set_streams(unbuffered=unbuffered or bool(environment.get("PYTHONUNBUFFERED")))
    places = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*map(os.path.abspath, places), *PATH]
    C.on_exit(C._exit, None)  # after Python has ended, and before libraries tear down what the server has loaded
    C.on_exit(C._IO_flush_all, None)
    return program


def set_log_level():
    """Have torch read its variable again, which it has read when it was loaded."""
    folder = Path(hidden["torch"].__file__).parent / "lib"
    ctypes.CDLL(str(folder / "libc10.so"))._ZN3c1011initLoggingEv()


def enter_host(pid):
    """Move this process to the host on which another one runs: its network, its host name, and its /etc."""
    for name in ("net", "uts", "mnt"):
        place = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        if C.setns(place, 0):
            os._exit(126)
        os.close(place)
    platform._uname_cache = None  # it has the name of another host


def show(words, environment):
    """Write command line and environment to where the kernel finds what it shows of them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    pairs = [f"{name}={value}" for name, value in environment.items()]
    for place, texts in ((45, words), (47, pairs)):
        start, end = map(int, fields[place : place + 2])
        text = b"".join(os.fsencode(one) + b"\0" for one in texts)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))
    C.prctl(PR_SET_NAME, Path(words[0]).name.encode()[:15], 0, 0, 0)


def set_streams(*, unbuffered):
    """Open the standard streams as Python does at its start."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        kept.append((getattr(sys, name), getattr(sys, f"__{name}__")))
        stream = open_stream(number, unbuffered=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def open_stream(number, *, unbuffered):
    try:
        os.fstat(number)
    except OSError:
        return None
    mode = "w" if number else "r"
    raw = unbuffered and number > 0
    plain = io.open(number, mode + "b", buffering=0 if raw else -1, closefd=False)  # noqa: UP020, SIM115
    stream = io.TextIOWrapper(
        plain, encoding=kept[-1][0].encoding, errors="backslashreplace" if number == 2 else "strict",
        newline="\n" if number else None, line_buffering=number == 2 or plain.isatty(), write_through=raw,
    )  # fmt: skip
    stream.mode = mode
    return stream


class End:
    """Ends the process when Python clears ``sys``, after all other modules.

    What Python does then is take apart the types that the server has loaded: half of all that a small program costs.
    """

    def __init__(self, status):
        self.status, self.streams = status, [one for one in (sys.__stdout__, sys.__stderr__) if one is not None]

    def __del__(self, end=os._exit, flush=C.fflush, wrong=OSError):  # the names of this module may be gone by then
        for stream in self.streams:
            try:
                if not stream.closed:
                    stream.flush()
            except wrong:
                self.status = 120  # as Python does it
        flush(None)
        end(self.status)


def run(program):
    """Run a program; its end is that of Python, up to what ``End`` leaves out."""
    status = 1
    try:
        run_as_main(program)
        status = 0
    except SystemExit as error:
        status = 0 if error.code is None else error.code
        raise
    except KeyboardInterrupt:  # Python kills itself by SIGINT, after all else
        status = None
        raise
    finally:
        if isinstance(status, int):
            sys._end = End(status & 0xFF)


def run_as_main(program):
    """Run start-up hooks and a script or module. An error ends it, and reads, as it would without these frames."""
    sys.modules["__main__"] = main = type(sys)("__main__")
    main.__builtins__ = builtins
    try:
        site.execsitecustomize()
        if site.ENABLE_USER_SITE:
            site.execusercustomize()
        if program[0] == "-m":
            sys.path.insert(0, str(Path.cwd()))
            runpy._run_module_as_main(program[1])
        else:
            run_script(program[0], vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.excepthook = lambda *_: None
        raise


def run_script(script, scope):
    path = os.path.abspath(script)  # noqa: PTH100 - as Python does it
    sys.path.insert(0, str(Path(path).resolve().parent))
    scope.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(compile(Path(path).read_bytes(), path, "exec"), scope)


from tests.preloaded import asking  # noqa: E402 - it is found by the folder that the next lines take away

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PADDING"}
PATH = sys.path[2:]
own_id = find_own_id()
requests = lift(socket.socket(fileno=int(sys.argv[1])))
load()
hide()
gc.collect()
gc.freeze()
signal.signal(signal.SIGINT, signal.SIG_DFL)
requests.send(b"ready")
while (wanted := become(requests, *serve(requests))) is None:
    pass
run(wanted)
