"""What the recorder's walls swallow: what our own code raised, and nothing that somebody else raised in between."""

import _thread
import ast
import contextlib
import ctypes
import dis
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ddpdoctor.recorder import calls, errors, frames, gradients, state, training, wrappers
from ddpdoctor.recorder.storage import ring_reading
from tests.scenarios.harmless.alone import RECORDER, make_folder


class PreemptedError(Exception):
    """An exception of a script."""


def handle(_number: int, _frame: object) -> None:
    raise PreemptedError("by a handler")


def handle_late(_number: int, _frame: object) -> None:
    raise TimeoutError(110, "by a handler")


class Handler:
    def method(self, *_args: object) -> None:
        raise ValueError("by a method")


class Sized:
    def __len__(self) -> int:
        raise ValueError("the script's own class, which our code asked")


def interrupt(handler: Callable[..., None]) -> None:
    """Do what an interrupted function of the recorder does: run a handler at once."""
    former = signal.signal(signal.SIGUSR2, handler)
    try:
        INTERRUPTED["signal"](signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, former)


def send(kind: type) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(_thread.get_ident()), ctypes.py_object(kind))
    INTERRUPTED["nothing"]()


def ours(source: str, **names: object) -> Callable[..., None]:
    """Return a function that counts as the recorder's own."""
    found: dict[str, Any] = dict(names)
    file = str(Path(state.__file__).with_name("made.py"))
    exec(compile(f"def run(*args):\n {source}", file, "exec"), found)
    return cast("Callable[..., None]", found["run"])


INTERRUPTED = {
    "signal": ours("kill(getpid(), *args); [None for _ in range(9)]", kill=os.kill, getpid=os.getpid),
    "nothing": ours("[None for _ in range(9)]"),
}
OF_OTHER_THREADS_OR_PROGRAMS = {
    "bootstrap/sitecustomize.py",  # before the script
    "frames.py", "waits.py",  # in the sampling thread
    "storage/files.py", "storage/fingerprint_file.py", "storage/flight.py", "storage/ring_reading.py",
    "storage/secrets.py",
}  # fmt: skip
NEVER_RAISED_BY_OTHERS = {"GeneratorExit", "StopIteration", "_OpaqueError", "AttributeError"}
HANDLERS = {
    "a function": lambda came: came,
    "a partial": lambda came: functools.partial(lambda _given, *args: came(*args), 1),
    "a method": lambda came: types.SimpleNamespace(handle=came).handle,
    "an object": lambda came: type("Handles", (), {"__call__": lambda _self, *args: came(*args)})(),
}
GO_ON = {
    **{kind: (PreemptedError, lambda make=make: interrupt(make(handle))) for kind, make in HANDLERS.items()},
    "a handler's TimeoutError, an OSError": (TimeoutError, lambda: interrupt(handle_late)),
    "a lambda that hides its arguments": (ZeroDivisionError, lambda: interrupt(lambda *_: 1 / 0)),
    "a method of a class": (ValueError, lambda: interrupt(Handler().method)),
    "Ctrl-C, whose handler is C code": (KeyboardInterrupt, lambda: interrupt(signal.default_int_handler)),
    "a class of the script, sent by a thread": (PreemptedError, lambda: send(PreemptedError)),
    "a class of Python, sent by a thread": (TimeoutError, lambda: send(TimeoutError)),
    "SystemExit of our own code": (SystemExit, ours("raise SystemExit(1)")),
}
SWALLOWED = {
    "our own": ours("return {}['absent']"),
    "our own class without a text": ours("raise LookupError"),
    "a function of Python that we call": lambda: json.loads("{"),
    "a C function that we call": ours("return open('/nowhere/at/all')", open=open),
    "a function of Python deeper down": ours("return loads('{')", loads=json.loads),
    "a class of the script that we ask": ours("return len(args[0])"),
    "no memory": ours("raise error", error=MemoryError()),
    "the end of an iterator": ours("return next(iter(()))"),
}


@pytest.mark.parametrize("name", GO_ON)
def test_what_is_not_ours_goes_on(name: str) -> None:
    kind, raising = GO_ON[name]
    before = state.here.failures
    with pytest.raises(kind) as raised:
        state.guarded("test")(ours("return raising()", raising=raising))()
    with pytest.raises(kind):
        state.pass_on(raised.value)
    assert state.here.failures == before


@pytest.mark.parametrize("name", SWALLOWED)
def test_what_is_ours_is_counted_and_swallowed(name: str) -> None:
    before = state.here.failures
    assert state.guarded("test")(ours("return failing(sized)", failing=SWALLOWED[name], sized=Sized()))() is None
    assert state.here.failures == before + 1


def test_where_python_would_only_print_it_an_exception_comes_soon_after() -> None:
    given: list[object] = []
    interrupted = ours("keep(args[0]); raising()", keep=given.append, raising=lambda: interrupt(handle))
    call = state.shielded("test", interrupted)

    def call_and_go_on(turn: int) -> None:
        call(turn)
        while True:
            time.sleep(0)

    for turn in range(3):
        with pytest.raises(PreemptedError, match="by a handler"):
            call_and_go_on(turn)
    assert given == [0, 1, 2]


def test_a_hook_outlives_an_interruption_anywhere_in_its_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that came out of it would end the generator, and each later backward would fail."""
    monkeypatch.setattr(state.here, "in_backward", True)
    for at in range(1, 1000):
        monkeypatch.setattr(state.here, "late", {})
        given: list[object] = []
        hook = ours("keep(args[0]); raising()", keep=given.append, raising=lambda: interrupt(handle))
        call = cast("Any", state.shielded("test", hook))
        wall = call.__self__.gi_code
        with interrupted(lambda code, wall=wall: code is wall, at, PreemptedError("by a trace function")) as seen:
            call(1)
        call(2)
        assert given[-1] == 2
        assert len(state.here.late[_thread.get_ident()]) >= 2, at
        if len(seen) < at:
            break
    assert 5 < at < 1000


@contextlib.contextmanager
def interrupted(
    is_meant: Callable[[types.CodeType], bool], at: int, error: Exception, begun: Callable[[], object] = lambda: True
) -> Iterator[list[str]]:
    """Raise at the n-th place of such code where Python looks for signals; yield the places that were passed."""
    places: list[str] = []

    def trace(frame: Any, event: str, _argument: object) -> Any:
        if not is_meant(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if event == "opcode" and name.startswith(("CALL", "JUMP_BACKWARD", "RESUME")) and begun():
            places.append(name)
            if len(places) == at:
                raise error
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield places
    finally:
        sys.settrace(former)


def test_an_interruption_of_our_own_handling_replaces_no_exception() -> None:
    """A wrapper of ours records the exception that it lets go on. Another one that interrupts it there comes later.

    It waits until the first one is handled, and does not replace it in a ``finally`` of torch on the way.
    """
    passed: list[int] = []
    note = ours("raising()", raising=lambda: interrupt(Handler().method))
    source = "try: raising()\n except BaseException:\n  sealed[wall.gi_running][note,]\n  raise"
    wrapper = ours(source, raising=lambda: interrupt(handle), note=note, sealed=state.sealed, wall=state.wall)

    def call() -> None:
        try:
            wrapper()
        finally:
            passed.extend(time.sleep(0) or turn for turn in range(9))

    def call_and_go_on(as_it_goes_on: Callable[[], None]) -> None:
        with pytest.raises(PreemptedError, match="by a handler"):
            call()
        while True:
            as_it_goes_on()

    hook = state.shielded("test", bool)
    for as_it_goes_on in (lambda: hook(None), lambda: _in_another_thread(state.raise_late)):
        before = state.here.failures
        with pytest.raises(ValueError, match="by a method"):
            call_and_go_on(as_it_goes_on)
        assert state.here.failures == before
    assert passed == [*range(9), *range(9)]


WRAPPERS = {
    "a collective": lambda original: calls.wrap("all_reduce", original, tensor=None),
    "a wait": calls.wrap_wait,
    "the next batch": training._next_batch,
    "a phase": training.phase("new_group", waits=True),
    "an exit": lambda original: errors._noting_exit(original, is_hard=False),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_interruption_anywhere_in_a_wrapper_loses_no_exception(name: str) -> None:
    """One is raised by the call, and one at the n-th place after it where Python looks for signals."""
    for at in range(1, 1000):
        raised: list[Exception] = []
        seen = _caught(WRAPPERS[name], raised, at)
        if len(raised) < 2:
            break
        assert seen == raised, at
    assert 3 < at < 1000


def _caught(wrap: Callable[..., Any], raised: list[Exception], at: int) -> list[Exception]:
    """Call a wrapped function that raises, with an interruption, and return what the caller sees."""

    def fail(*_tensor: object) -> None:
        raised.append(PreemptedError("by the call"))
        raise raised[0]

    caught: list[Exception] = []
    late, places = TimeoutError("by a trace function"), list[str]()
    try:
        with interrupted(lambda code: frames.is_own_file(code.co_filename), at, late, lambda: raised) as places:
            try:
                wrap(fail)(torch.zeros(1))
            except (PreemptedError, TimeoutError) as error:
                caught += [error]
            for _ in range(9):
                state.sealed[state.wall.gi_running][bool,]
                time.sleep(0)
    except TimeoutError as error:
        caught += [error]
    raised += [late] if len(places) >= at else []
    return caught


def _in_another_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_script_that_handles_an_exception_is_interrupted_at_once() -> None:
    note = state.guarded("test")(ours("raising()", raising=lambda: interrupt(Handler().method)))

    def handle_one() -> None:
        try:
            interrupt(handle)
        except PreemptedError:
            note()

    with pytest.raises(ValueError, match="by a method") as raised:
        handle_one()
    assert isinstance(raised.value.__context__, PreemptedError)


def test_each_exception_that_comes_in_one_backward_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a backward torch would end early, so they are raised after it, one from each call."""
    interrupted = iter(range(2))
    hook = state.shielded("test", ours("raising()", raising=lambda: interrupt(handle)))
    monkeypatch.setattr(gradients._kept, "watches", {None: None})
    monkeypatch.setattr(gradients, "_enter", lambda *_: None)

    def leave() -> None:
        if next(interrupted, None) == 0:
            interrupt(handle_late)

    monkeypatch.setattr(gradients, "_leave", leave)
    ran: list[object] = []

    def original(number: int) -> int:
        ran.append(number)
        if number == 0:
            hook(None)
            hook(None)
        return number

    backward = gradients.tracking(original)
    for kind in (PreemptedError, PreemptedError, TimeoutError):
        with pytest.raises(kind, match="by a handler"):
            backward(len(ran))
    assert backward(9) == 9
    assert ran == [0, 9]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """``signal`` as a script sees it, in a process whose backwards are tracked."""
    monkeypatch.setattr(gradients._kept, "watches", {None: None})
    monkeypatch.setattr(gradients, "_enter", lambda *_: None)
    functions = ("signal", "getsignal", "default_int_handler")
    module = types.SimpleNamespace(**{name: getattr(signal, name) for name in functions})
    wrappers.patch_signal(module)
    former = signal.getsignal(signal.SIGUSR2)
    yield module
    signal.signal(signal.SIGUSR2, former)


@pytest.mark.parametrize("kind", HANDLERS)
def test_a_handler_waits_while_our_hooks_run_in_a_backward(patched: types.SimpleNamespace, kind: str) -> None:
    """Without us the signals would wait too, because no Python code would run there, and be one for Python."""
    came: list[str] = []

    def raises(number: int, frame: types.FrameType) -> None:
        came.append(f"{number} in {frame.f_code.co_name}")
        raise PreemptedError("by a handler")

    handler = HANDLERS[kind](raises)
    former = patched.getsignal(signal.SIGUSR2)
    assert patched.signal(signal.SIGUSR2, handler) == former
    assert patched.getsignal(signal.SIGUSR2) is handler
    hooks = [state.shielded("test", INTERRUPTED["signal"]), state.guarded("test")(INTERRUPTED["signal"])]
    ran: list[int] = []

    def original(number: int) -> None:
        for hook in hooks * 2:
            hook(number)
            ran.append(number)
        assert not came

    with pytest.raises(PreemptedError) as raised:
        gradients.tracking(original)(signal.SIGUSR2)
    assert ran == [signal.SIGUSR2] * 4
    assert came == [f"{signal.SIGUSR2.value} in {sys._getframe().f_code.co_name}"]
    files = [step.filename for step in traceback.extract_tb(raised.value.__traceback__)]
    assert files[-1] == __file__
    assert patched.signal(signal.SIGUSR2, signal.SIG_IGN) is handler
    assert patched.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    gradients.tracking(lambda: None)()
    assert len(came) == 1


@pytest.mark.parametrize("kind", HANDLERS)
def test_what_a_handler_raises_is_known_after_our_frames_are_hidden(patched: types.SimpleNamespace, kind: str) -> None:
    """A call through which it passes has not failed: none is noted, and nothing is written while it passes."""

    def raises(*_: object) -> None:
        raise PreemptedError("by a handler")

    patched.signal(signal.SIGUSR2, HANDLERS[kind](raises))
    with pytest.raises(PreemptedError) as raised:
        INTERRUPTED["signal"](signal.SIGUSR2)
    wrappers.hide_own_frames(raised.value)
    assert state.came_from_outside(raised.value)


def test_a_handler_that_waited_runs_when_the_backward_fails(patched: types.SimpleNamespace) -> None:
    hook = state.shielded("test", INTERRUPTED["signal"])

    def fails(number: int) -> None:
        hook(number)
        raise LookupError

    patched.signal(signal.SIGUSR2, handle)
    with pytest.raises(PreemptedError) as raised:
        gradients.tracking(fails)(signal.SIGUSR2)
    assert isinstance(raised.value.__context__, LookupError)


def test_a_handler_does_not_wait_in_what_the_script_runs_in_a_backward(patched: types.SimpleNamespace) -> None:
    seen: list[str] = []
    patched.signal(signal.SIGUSR2, lambda _number, frame: seen.append(frame.f_code.co_name))

    def recomputes(number: int) -> None:
        os.kill(os.getpid(), number)
        assert seen == ["recomputes"]

    gradients.tracking(recomputes)(signal.SIGUSR2)
    assert seen == ["recomputes"]


def test_every_wall_lets_go_on_what_is_not_ours() -> None:
    """An ``except`` that goes on calls ``pass_on``, or ``failed``, which calls it, unless it raises anyway."""
    root = Path(state.__file__).parent
    walls = [
        (str(path.relative_to(root)), handler)
        for path in sorted(root.rglob("*.py"))
        for handler in ast.walk(ast.parse(path.read_text()))
        if isinstance(handler, ast.ExceptHandler)
    ]
    assert len(walls) > 60
    silent = [
        f"{path}:{handler.lineno}"
        for path, handler in walls
        if path not in OF_OTHER_THREADS_OR_PROGRAMS
        and (handler.type is None or ast.unparse(handler.type) not in NEVER_RAISED_BY_OTHERS)
        and not re.search(r"pass_on\(|\.failed\(|raise|error = raised", ast.unparse(handler))
    ]
    assert silent == []


def test_a_process_without_a_run_folder_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDPDOCTOR_RUN", raising=False)
    state.Recorder().lost("why")
    assert list(tmp_path.iterdir()) == []


# The start-up hook: off without its variable, harmless when it fails, chained to a sitecustomize that stood there.


def python(
    code: str, *paths: Path, executable: str | Path = sys.executable, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DDPDOCTOR_")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (RECORDER / "bootstrap", *paths))), **env}
    command = [executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=cwd)


RANK = {"DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"}
SHOW = """
import sys
print('_ddpdoctor_recorder' in sys.modules, any('bootstrap' in p for p in sys.path))
print([name for name in ('torch', 'asyncio', 'typing_extensions') if name in sys.modules])
"""


def test_the_recorder_is_loaded_with_its_variable_alone_and_makes_a_ring_of_a_rank(tmp_path: Path) -> None:
    """Its folder is not on the path, and torch is not loaded for it."""
    run = {"DDPDOCTOR_RUN": str(make_folder(tmp_path))}
    for env, loaded, rings in (({}, False, 0), (run, True, 0), (run | RANK, True, 1)):
        assert python(SHOW, **env).stdout == f"{loaded} False\n[]\n"
        assert len(list((tmp_path / "rings").iterdir())) == rings


@pytest.mark.parametrize("is_rank", [False, True])
def test_what_costs_time_to_import_is_not_imported_for_us(tmp_path: Path, *, is_rank: bool) -> None:
    code = "import sys; print(*sorted(sys.modules), sep=chr(10))"
    run = {"DDPDOCTOR_RUN": str(make_folder(tmp_path))}
    added = {*python(code, **run, **(RANK if is_rank else {})).stdout.split()} - {*python(code).stdout.split()}
    slow = {"collections", "enum", "functools", "inspect", "json", "re", "signal", "sysconfig", "threading", "typing"}
    assert not added & slow
    parts = {name for name in added if name.startswith("_ddpdoctor_recorder.")}
    assert is_rank or {name.rpartition(".")[2] for name in parts} <= {"hooks", "settings", "start", "state"}


def test_a_module_and_a_package_that_stood_there_are_loaded_with_and_without_us(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "sitecustomize.py").write_text("print('module')")
    (tmp_path / "two" / "sitecustomize").mkdir(parents=True)
    (tmp_path / "two" / "sitecustomize" / "__init__.py").write_text("print('package')")
    run = str(make_folder(tmp_path))
    for name, text in (("one", "module\n"), ("two", "package\n")):
        assert python("pass", tmp_path / name).stdout == text
        assert python("pass", tmp_path / name, DDPDOCTOR_RUN=run).stdout == text


def test_a_folder_that_is_gone_or_full_costs_the_record_and_nothing_else(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "rings").rmdir()
    (tmp_path / "rings").write_text("not a folder")
    for name in ("gone", "."):
        done = python("print('trained')", **RANK | {"DDPDOCTOR_RUN": str(tmp_path / name), "RANK": "3"})
        assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    (word,) = tmp_path.glob("lost-*")
    assert word.read_text().startswith("3\nno ring could be made")


FORK = """
import sys, os
loaded = []
def note(event, args):
    if event == "ctypes.dlopen" or event == "import" and str(args[1]).endswith(".so"):
        loaded.append((event, *args[:2]))
sys.addaudithook(note)
if os.fork():
    os.wait()
else:
    print(loaded, flush=True)
    os._exit(0)
"""


def test_a_forked_child_loads_no_library_for_its_ring(tmp_path: Path) -> None:
    """It would die in ``dlopen`` if another thread of its parent was in there when it was forked."""
    done = python(FORK, **RANK, DDPDOCTOR_RUN=str(make_folder(tmp_path)))
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert sorted([ring_reading.read_ring_file(path).role for path in (tmp_path / "rings").iterdir()]) == [1, 2]


# The recorder loads by its path into any Python from 3.8 on, with nothing of ddpdoctor installed there.


FILES = sorted(RECORDER.rglob("*.py"))
MINORS = (8, *(pytest.param(minor, marks=pytest.mark.full) for minor in range(9, 13)), 13, 14)
NEWER = {"annotationlib", "compression", "graphlib", "tomllib", "zoneinfo"}
"""Modules of the standard library that came after Python 3.8."""
BUILT_IN_GENERICS = {"dict", "frozenset", "list", "set", "tuple", "type"}
SCRIPT = """
import importlib, os, sys, threading, types
import _ddpdoctor_recorder
home = _ddpdoctor_recorder.__path__[0]
sys.modules["torch"] = types.ModuleType("torch")  # as early as where hooks load what imports it
for folder, _, files in os.walk(home):
    for file in [] if folder.endswith("bootstrap") else files:
        if file.endswith(".py") and file not in ("__init__.py", "fingerprint.py"):  # its constants are torch's
            name = os.path.relpath(os.path.join(folder, file), home)[:-3].replace(os.sep, ".")
            importlib.import_module("_ddpdoctor_recorder." + name)
thread = threading.Thread(target=print, args=("trained",))
thread.start(); thread.join()
if hasattr(os, "fork") and os.fork() == 0:
    os._exit(0)
def fail():
    raise ValueError("seeded")
fail()
"""


def installed_python(minor: int) -> str | None:
    """Return a Python of that version that starts, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(map(str, pyenv.glob(f"versions/3.{minor}.*/bin/python")))
    for path in (shutil.which(f"python3.{minor}"), *installed):
        code = "import sys; print(sys.version_info[1])"
        if path and subprocess.run([path, "-c", code], capture_output=True, check=False).stdout == b"%d\n" % minor:
            return path
    return None


def evaluated(tree: ast.AST) -> list[ast.AST]:
    """Return what is evaluated at run time: all but annotations and what only type checkers see."""
    found = [tree]
    for node in found:
        for name, value in ast.iter_fields(node):
            of_checkers = name == "body" and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            if name not in ("annotation", "returns") and not of_checkers:
                found += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]
    return found


def imported(tree: ast.AST) -> set[str]:
    """Return the names of all modules that a file imports, by their first part."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_python_3_8(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    generics = [
        node.lineno
        for node in evaluated(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in BUILT_IN_GENERICS
    ]
    assert generics == []
    assert not imported(tree) & NEWER
    annotated = any(getattr(node, "annotation", None) or getattr(node, "returns", None) for node in ast.walk(tree))
    first = next((node for node in tree.body if isinstance(node, ast.ImportFrom)), None)
    assert not annotated or (first is not None and first.module == "__future__")


@pytest.mark.skipif(sys.platform != "linux", reason="the recorder is for Linux")
@pytest.mark.parametrize("minor", MINORS)
def test_a_rank_of_another_python_is_recorded(minor: int, tmp_path: Path) -> None:
    other = installed_python(minor)
    if other is None:
        pytest.skip(f"no Python 3.{minor} is installed here")
    env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore", **RANK}
    done = python(SCRIPT, executable=other, cwd=tmp_path, DDPDOCTOR_RUN=str(make_folder(tmp_path)), **env)
    assert list(tmp_path.glob("lost-*")) == []
    rings = [ring_reading.read_ring_file(path) for path in (tmp_path / "rings").iterdir()]
    assert (done.returncode, done.stdout) == (1, "trained\n"), done.stderr
    assert done.stderr.endswith("ValueError: seeded\n")
    (rank,) = [ring for ring in rings if any(note.get("k") == "raised" for note in ring.notes)]
    assert [note for note in rank.notes if note.get("k") == "defect"] == []
    assert rank.cells["main_ended_ns"]
