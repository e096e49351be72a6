"""What a rank says of its stack, of errors and of what it waits for."""

import asyncio
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from filelock import FileLock, Timeout
from torch.utils.file_baton import FileBaton

from ddpdoctor.collect.proc import read_io
from ddpdoctor.collect.recorded import errors_of_child
from ddpdoctor.recorder import errors, frames, waits
from ddpdoctor.recorder.errors import reason_of
from ddpdoctor.recorder.sampler import Sampler, write_quietly
from ddpdoctor.recorder.state import MASTER_VARIABLE, here
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.golden import Cases, words
from tests.scenarios.harmless.alone import RECORDER, make_folder, read_rings, run_recorded
from tests.scenarios.running import clean_environment

CASES = Cases(__name__)
test_kept = CASES.test()

# What the recorder can say of an error while the script still has it in hand.


def asked_from_another_thread() -> object:
    answers = []
    asker = threading.Thread(target=lambda: answers.append(errors.handled_now()))
    asker.start()
    asker.join()
    return answers[0]


def read_shard() -> None:
    raise ValueError("bad shard")


@pytest.fixture
def main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this thread be the main one, which has handled no error yet."""
    monkeypatch.setattr(here, "main_thread", threading.get_ident())
    monkeypatch.setattr(errors, "_handled", {})


@pytest.mark.usefixtures("main_thread")
def test_the_error_that_the_main_thread_handles_is_reported() -> None:
    assert asked_from_another_thread() is None
    try:
        read_shard()
    except ValueError:
        reported = asked_from_another_thread()
    assert (reported["type"], reported["text"]) == ("ValueError", "bad shard")
    assert reported["frames"][-1]["n"] == "read_shard"
    assert asked_from_another_thread() is None


@pytest.mark.usefixtures("main_thread")
def test_the_error_under_which_a_call_begins_is_noted_once_and_the_time_of_the_last_such_call(ring: Ring) -> None:
    for second in range(2):
        try:
            read_shard()
        except ValueError as error:
            for call in range(3):
                errors.note_handled(error, 10 * second + call)
    assert ring.get("handling_ns") == 12
    first, *_ = notes = ring_reading.read_ring_file(ring.path).notes
    assert (first["k"], first["type"], first["text"], first["frames"][-1]["n"], len(notes) <= 2) == (
        "handled", "ValueError", "bad shard", "read_shard", True,
    )  # fmt: skip


@pytest.mark.usefixtures("main_thread")
def test_an_error_under_which_the_script_trains_explains_no_call(ring: Ring) -> None:
    try:
        read_shard()
    except ValueError as error:
        errors.note_handled(error, 1)
        assert errors.handled_now() is not None
        for call in range(2, 100):
            errors.note_handled(error, call)
        failed = OSError("reset by peer")
        failed.__context__ = error
        errors.note_exception(failed, uncaught=False, call="all_reduce")
        notes = ring_reading.read_ring_file(ring.path).notes
        assert [note["first"] for note in notes if note["k"] == "raised"] == [None]
        assert (errors.handled_now(), ring.get("handling_ns")) == (None, errors.MOST_CALLS_OF_HANDLER)


def test_an_error_at_the_address_of_an_earlier_one_is_noted(ring: Ring, monkeypatch) -> None:
    monkeypatch.setattr(errors, "_noted", {})
    first = ValueError("first")
    errors.note_exception(first, uncaught=False, call="barrier")
    address, others = id(first), []
    del first
    while len(others) < 1000 and id(others[-1] if others else None) != address:
        others.append(ValueError("second"))
    assert id(others[-1]) == address
    for _ in range(2):
        errors.note_exception(others[-1], uncaught=False, call="all_reduce")
    notes = ring_reading.read_ring_file(ring.path).notes
    assert [(note["text"], note["call"]) for note in notes] == [("first", "barrier"), ("second", "all_reduce")]


FORKS = """
import os
from _ddpdoctor_recorder import errors
kept = []
def fail(text):
    kept.append(ValueError(text))
    errors.note_exception(kept[-1], uncaught=False, call="barrier")
for number in range(errors.MAX_NOTES + 5):
    fail(str(number))
if not os.fork():
    fail("of the child")
    os._exit(0)
os.wait()
"""
LEAVES = """
import sys
sys.exit("no access to https://me:hunter2@host with password=hunter2, " + "x" * 50 + " hf_hunter2hunter2hunter2")
"""
THREAD = """
import os, sys, threading, time
def watch():
    while sys._current_frames()[main].f_code.co_name != "stands":
        pass
    os._exit({status})
def stands():
    time.sleep(600)
main = threading.get_ident()
threading.Thread(target=watch, daemon=True).start()
stands()
"""
LIMIT = """
import faulthandler, os
f = open("/dev/null", "w")
faulthandler.dump_traceback_later(900, {options})
{then}
os._exit(0)
"""
FAMILY = """
import os, subprocess, sys
def child(*arguments):
    subprocess.run([*arguments, sys.executable, os.path.join(os.path.dirname(__file__), "evaluate.py")], check=False)
child()
child("bash", "-c", '"$@"; exit $?', "-")
subprocess.run([sys.executable, "-c", "raise KeyError"], check=False)
"""
EVALUATE = "def load():\n    raise LookupError('no weights')\nload()\n"
SCRIPT = """
import sys
from _ddpdoctor_recorder import errors
def barrier():
    try:
        library["wait"]()
    except RuntimeError as error:
        error.__traceback__ = error.__traceback__.tb_next  # of the library alone
        errors.note_exception(error, uncaught=False, call="barrier")
        raise
library = {}
exec(compile("def wait(): raise RuntimeError('closed by peer')", "/lib/site-packages/torch/c10d.py", "exec"), library)
def run():
    try:
        raise OSError("no such shard")
    except OSError:
        sys.exit(3)
    finally:
        barrier()
run()
"""
SCRIPTS = {
    "a forked child notes its errors, however many its parent had": FORKS,
    "a text with which it exits is stored without secrets": LEAVES,
    "another thread ends it": THREAD.format(status=3), "another thread ends it well": THREAD.format(status=0),
    "scripts that it runs leave their errors": FAMILY,
    "the error before it exited and called is the first": SCRIPT,
    **{f"{then or 'goes on'} after a limit of faulthandler with {options}": LIMIT.format(options=options, then=then)
       for options in ("exit=True", "exit=False", "file=f, exit=True")
       for then in ("", "faulthandler.cancel_dump_traceback_later()")},
}  # fmt: skip


@CASES
def what_scripts_leave_of_their_errors(tmp_path: Path) -> dict[str, Any]:
    found = {}
    for number, (name, script) in enumerate(SCRIPTS.items()):
        folder = make_folder(tmp_path / str(number) / "run")
        (folder.parent / "evaluate.py").write_text(EVALUATE)
        (folder.parent / "train.py").write_text(script)
        ended = run_recorded(folder, str(folder.parent / "train.py"))
        (rank,) = read_rings(folder)
        children = read_rings(folder, ring_layout.ROLE_CHILD)
        limit = rank.cells["own_limit_ns"] > rank.cells["started_ns"] + 900e9
        of_children = [pair for child in children for pair in errors_of_child(child)]
        assert {pid for pid, _ in of_children} <= {rank.pid}
        assert [path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()] == []
        found[name] = {
            f"status {ended.status}": "" if not rank.cells["own_limit_ns"] else f"its limit: {limit}",
            "rank": [line for note in rank.notes if (line := _said(note))][-2:],
            "children": sorted(line for child in children for note in child.notes if (line := _said(note))),
            "as errors of children": [error["error"]["text"] for _, error in of_children],
        }
    return found


def _said(note: dict[str, Any]) -> str:
    """Return what a note says of an error or an end, and "" for others."""
    if note["k"] == "exit":
        return f"exit {note['status']}"
    if note["k"] == "ended_by_thread":
        return f"ended by {note['frame']['n']}, main thread at {[frame['n'] for frame in note['stack']]}"
    if note["k"] != "raised":
        return ""
    first = note["first"] and f", first {note['first']['text']} in {note['first']['frames'][-1]['n']}"
    return f"{note['type']} {note['text']!r} in call {note['call']}{first or ''}"


# The error behind one that a library of torch's raised on account of it.


LIBRARY = "/usr/lib/site-packages/torch/distributed/library.py"
WRAPPING = """
def run(stage):
    try:
        stage()
    except Exception as error:
        raise RuntimeError("stage failed") from error
"""


def library(text: str = WRAPPING, name: str = "run") -> Callable[..., Any]:
    """Return a function of a library of torch's."""
    names: dict[str, Any] = {}
    exec(compile(text, LIBRARY, "exec"), names)
    return names[name]


def bad_stage() -> None:
    raise ValueError("no such sample")


def bad_collective() -> None:
    library("def wait(): raise RuntimeError('closed by peer')", "wait")()


class CheckpointException(BaseException):
    def __init__(self, failures: dict[int, Any]) -> None:
        super().__init__("failed")
        self.failures = failures


def raised_by(action: Any) -> BaseException:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - that of a checkpoint is no Exception
        return error
    raise AssertionError


def fail(error: BaseException) -> None:
    raise error


def wrapped(*, cause: bool, own: BaseException) -> BaseException:
    """Return what a script raises in an ``except`` of another error, from it or not."""

    def run() -> None:
        try:
            fail(own)
        except Exception as error:  # noqa: BLE001 - any
            raise KeyError("sample") from (error if cause else None)

    return raised_by(run)


def cleaned_up(own: BaseException) -> BaseException:
    """Return what a call raises in the ``finally`` of another error."""

    def run() -> None:
        try:
            fail(own)
        finally:
            bad_collective()

    return raised_by(run)


def gathered() -> BaseException:
    own = raised_by(bad_stage)
    return raised_by(lambda: fail(CheckpointException({1: (own, traceback.extract_tb(own.__traceback__))})))


def grouped() -> BaseException:
    kind = type("BaseExceptionGroup", (Exception,), {"exceptions": (raised_by(bad_stage),)})
    return raised_by(lambda: fail(kind("unhandled errors in a TaskGroup")))


def by_library(stage: Callable[[], None]) -> BaseException:
    return raised_by(lambda: library()(stage))


OWN, LOST = ValueError("no such sample"), raised_by(bad_collective)
REASONS: dict[str, tuple[BaseException, dict[str, Any]]] = {
    # the error, and its rank, whether it is raised by a call now, and how deep below it that of an earlier call is
    "a library wraps that of the user": (by_library(bad_stage), {}),
    "a library wraps one of its own": (by_library(library("def inner(): raise OSError('no route')", "inner")), {}),
    "a library wraps that of a recorded call": (by_library(bad_collective), {"call": 1}),
    "of all ranks, on one that failed": (gathered(), {"rank": 1}),
    "of all ranks, on one that did not": (gathered(), {"rank": 0}),
    "its cause": (wrapped(cause=True, own=OWN), {}),
    "context of its own code": (wrapped(cause=False, own=ValueError("a default is used")), {}),
    "context of a call that fails now": (cleaned_up(OWN), {"in_call": True}),
    "end of a loop": (cleaned_up(StopIteration()), {"in_call": True}),
    "no call": (cleaned_up(OWN), {}), "a group": (grouped(), {}),
    **{f"made of that of a call, as its cause: {cause}": (wrapped(cause=cause, own=LOST), {"call": 1})
       for cause in (True, False)},
}  # fmt: skip


@CASES
def errors_behind_errors() -> dict[str, str]:
    shown = {}
    for name, (error, given) in REASONS.items():
        of_call = (error.__cause__ or error.__context__) if given.get("call") else None
        is_of_call = (of_call,).__contains__ if of_call is not None else ().__contains__
        found = reason_of(error, given.get("rank", 0), is_of_call, in_call=given.get("in_call", False))
        assert found.first is None or found.first in {OWN, *getattr(error, "exceptions", ())}
        shown[name] = f"{found.error!r} in {found.frames[-1]['n'] if found.frames else None}, "
        shown[name] += f"of a call: {found.error is of_call}, passed on as {found.passed_on!r}, "
        shown[name] += f"first {found.first!r}, ranks {found.ranks}"
    return shown


# What works for the main thread and is not on its stack: asyncio tasks, and calls in pools.


HERE = Path(__file__).name


async def takes(queue):
    return await queue.get()


async def sleeps(seconds):
    await asyncio.sleep(seconds)


async def through_task(queue):
    await asyncio.create_task(takes(queue))


async def gathers(queue):
    await asyncio.gather(sleeps(0), takes(queue), return_exceptions=True)


async def with_limit(queue):
    await asyncio.wait_for(takes(queue), 600)


async def first_of(queue):
    await asyncio.wait([asyncio.ensure_future(takes(queue))])


async def comprehends(queue):
    return [await queue.get() for _ in range(2)]


@pytest.mark.parametrize(
    ("wait", "expected", "way"),
    [
        *((takes, ["takes"], way) for way in ("run", "until", "forever")),
        (through_task, ["through_task", "takes"], "run"), (gathers, ["gathers", "takes"], "run"),
        (with_limit, ["with_limit", "takes"], "run"), (first_of, ["first_of", "takes"], "run"),
        (comprehends, ["comprehends"], "run"),
    ],
)  # fmt: skip
def test_the_awaited_lines_of_the_task_that_a_thread_runs_are_found(wait, expected, way):
    own, found = threading.get_ident(), []

    async def main():
        queue = asyncio.Queue()

        def look():
            while not found:
                seen = [frame["n"] for frame in waits.awaited(own) if frame["f"].endswith(HERE)]
                if [name for name in seen if name not in {"main", "<listcomp>"}] == expected:
                    found.append(seen)
            for _ in range(2):
                loop.call_soon_threadsafe(queue.put_nowait, 1)

        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=look)
        thread.start()
        await wait(queue)
        thread.join()

    if way == "run":
        asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        task = loop.create_task(main())
        if way == "until":
            loop.run_until_complete(task)
        else:
            task.add_done_callback(lambda _: loop.stop())
            loop.run_forever()
    assert found[0][0] == "main"


async def fails(text):
    raise LookupError(text)


def test_the_error_of_a_held_task_counts_until_it_is_read(monkeypatch):
    monkeypatch.setattr(waits, "_kept", waits.deque())
    assert waits.awaited(threading.get_ident()) == [], "it runs no loop"

    async def main():
        tasks = [asyncio.create_task(fails("read")), asyncio.create_task(fails("unread"), name="rollout")]
        await asyncio.wait(tasks)
        with pytest.raises(LookupError):
            await tasks[0]
        lost = waits.lost()
        assert [(one["who"], one["name"], one["text"]) for one in lost] == [("task", "rollout", "unread")]
        assert lost[0]["frames"][-1]["n"] == "fails"
        assert waits.lost()[0]["text"] == "unread"  # it was only looked at
        tasks[1].exception()
        assert waits.lost() == []

    asyncio.run(main())


POOLS = """
import asyncio, gc, json, threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from _ddpdoctor_recorder import waits

def fails(text):
    raise LookupError(text)

async def drops():
    async def task():
        fails("dropped task")
    asyncio.ensure_future(task())
    await asyncio.sleep(0.01)
    gc.collect()

with ThreadPoolExecutor(1) as pool:
    dropped = [pool.submit(fails, "dropped call")]
    asked, looked = pool.submit(fails, "asked"), pool.submit(fails, "looked at")
    fine = pool.submit(int, "3")
    assert fine.result() == 3 and looked.exception() is not None
    try:
        asked.result()
    except LookupError as error:
        names = []
        step = error.__traceback__
        while step is not None:
            names.append(step.tb_frame.f_code.co_filename)
            step = step.tb_next
        assert not any("_ddpdoctor" in name or "importlib._bootstrap" in name for name in names), names
with ThreadPool(1) as pool:
    left, got = pool.apply_async(fails, ("left in a pool",)), pool.apply_async(fails, ("got",))
    left.wait()
    try:
        got.get()
    except LookupError:
        pass
loop = asyncio.new_event_loop()
loop.set_exception_handler(lambda *unused: None)
loop.run_until_complete(drops())
print(json.dumps([(one["who"], one["text"], one["frames"][-1]["n"]) for one in waits.lost()]))
"""


def test_errors_of_calls_in_pools_and_of_tasks_that_are_gone_count_until_they_are_read(tmp_path):
    ran = run_recorded(make_folder(tmp_path / "run"), "-c", POOLS)
    assert json.loads(ran.stdout.splitlines()[-1]) == [
        ["call", "dropped call", "fails"], ["call", "left in a pool", "fails"], ["task", "dropped task", "fails"],
    ]  # fmt: skip


# A rank that is asked to end leaves its stack, and nothing that a script can see or do is different for it.


WAIT = """
import os, signal, time
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
def wait():
    os.write(1, b'there\\n')
    time.sleep(60)
"""
OWN_LAST_WORDS = """
def own(*_):
    os.write(1, b'own\\n')
    raise SystemExit(4)
assert signal.signal(signal.SIGTERM, own) == signal.SIG_DFL
wait()
"""
LOOP = """
import asyncio
import importlib
async def main():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    print('there', flush=True)
    await asked.wait()
    print('asked', flush=True)
asyncio.run(main())
"""
FORK = """
import os
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    os.kill(os.getpid(), 15)
"""
FAULTHANDLER = "import faulthandler\nfaulthandler.register(signal.SIGTERM, file=open('own.txt', 'w'), chain=True)\n"


def end(folder, text, **env):
    """Run a rank until it says that it is there, tell it to end; return its status, its output and its last words."""
    (folder / "train.py").write_text(text)
    path = str(RECORDER / "bootstrap")
    environment = clean_environment(PYTHONPATH=path, DDPDOCTOR_RUN=str(make_folder(folder)), RANK="0", **env)
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if "there" in said:
        process.terminate()
    said += process.communicate(timeout=200)[0]
    words = [path.read_text() for path in (folder / "evidence").glob("*.term")]
    return process.returncode, said.split(), "".join(words)


ME = str(os.getpid())


def asked_to_end(row: str) -> str:
    """Return how a script ends that is asked to, what it says, and which calls of its own its last words have."""
    text, _, env = row.partition(" | ")
    with TemporaryDirectory() as place:
        status, said, words = end(Path(place), eval(text), **dict([env.replace("ME", ME).split("=")] if env else []))
        registered = [path.name for path in Path(place, "evidence").glob("*.term")]
        assert not (env and registered), "nothing is registered"
        own = Path(place, "own.txt").read_text() if "FAULTHANDLER" in text else ""
    left = [name for name in ("wait", "<module>") if f" in {name}\n" in f"{words}\n"]
    return f"status {status}, said {said}, left {left}, its own {' in wait' in own}"


# Evidence is written without a byte that would count as the script's own I/O.


def test_what_is_written_quietly_is_there_and_counts_as_no_progress(tmp_path: Path) -> None:
    data = b"evidence " * 100_000
    before = read_io(os.getpid())
    write_quietly(str(tmp_path / "file"), data)
    after = read_io(os.getpid())
    assert before is not None
    assert after is not None
    assert after.read + after.written - before.read - before.written < 10_000
    assert (tmp_path / "file").read_bytes() == data


READS_STACKS = """
import gc, os, random, sys, threading, time
from ddpdoctor.recorder import frames

random.seed(1)

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        if random.random() < 0.02:
            time.sleep(0)  # lets go of the GIL in the middle of a collection

def deep(n):
    if n:
        return deep(n - 1)
    Cycle()

def read(main):
    looks, until = 0, time.monotonic() + 15
    while looks < 150_000 and time.monotonic() < until:
        looks += 1
        for code, line in frames.of_thread(main):
            assert code.co_name and line >= 0
    os._exit(0 if looks > 100 else 1)

sys.setswitchinterval(1e-5)
threading.Thread(target=read, args=(threading.get_ident(),), daemon=True).start()
while True:
    deep(random.randrange(2, 40))
"""


@pytest.mark.full
def test_stacks_of_a_thread_that_runs_are_read_without_harm() -> None:
    """With ``f_back``, frame by frame, this died of SIGSEGV within seconds on CPython 3.11."""
    ran = subprocess.run([sys.executable, "-c", READS_STACKS], check=False, capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("by_main", [True, False])
def test_an_import_is_progress_and_one_of_another_thread_is_none(tmp_path: Path, monkeypatch, *, by_main: bool) -> None:
    """torch's own threads import when they write what is pending, while the script's main thread sleeps on."""
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, os.getpid(), 1)
    sampler = Sampler(1.0)
    sampler.sample_imports(ring)
    before = ring.get("new_functions")
    sampler.sample_imports(ring)
    assert ring.get("new_functions") == before
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(here, "main_thread", threading.get_ident())
    monkeypatch.setitem(sys.modules, "sampled", types.SimpleNamespace(sample=lambda: sampler.sample_imports(ring)))
    name = f"imported_by_{by_main}"
    (tmp_path / f"{name}.py").write_text("import sampled\nsampled.sample()\n")
    if by_main:
        importlib.import_module(name)
    else:
        with ThreadPoolExecutor(1) as other:
            other.submit(importlib.import_module, name).result()
    monkeypatch.delitem(sys.modules, name)
    assert ring.get("new_functions") == before + by_main


ASKED = """
import os
os.mkdir(os.environ["DDPDOCTOR_RUN"] + "/evidence")
from ddpdoctor.recorder import state
from ddpdoctor.recorder import sampler
from ddpdoctor.recorder.storage import ring_layout
state.here.is_rank = True
one = sampler.Sampler(0.1)
state.here.queries["groups"] = lambda: os._exit(7)  # as a query that never comes back
one.answer(1)
"""


@pytest.mark.parametrize(("kind", "status"), [("is_rank", 7), ("is_child", 0)])
def test_both_looks_are_on_disk_before_torch_is_asked_and_no_child_asks_it(
    kind: str, status: int, tmp_path: Path
) -> None:
    program = ASKED.replace("is_rank", kind)
    done = subprocess.run([sys.executable, "-c", program], env={"DDPDOCTOR_RUN": str(tmp_path)}, check=False)
    (answer,) = (json.loads(path.read_text()) for path in (tmp_path / "evidence").glob("*.json"))
    assert (done.returncode, len(answer["looks"]), answer.get("complete", 0)) == (status, 2, not status)


# What the stack of a waiting rank names: the lock file that it polls for, and the line that moved the job's store.


def poll(path: Path, done: threading.Event) -> None:
    while os.path.exists(path) and not done.is_set():  # noqa: PTH110 - as scripts do
        time.sleep(0.01)


def wait_for_other_file(path: Path, done: threading.Event) -> None:
    while path.exists() and not done.is_set():
        time.sleep(0.01)


def sleep_only(path: Path, done: threading.Event) -> None:
    while path is not None and not done.is_set():
        time.sleep(0.01)


def baton(path: Path, done: threading.Event) -> None:  # noqa: ARG001 - ends when its file is gone
    FileBaton(str(path), wait_seconds=0.01).wait()


def ask_kernel(path: Path, done: threading.Event) -> None:
    while not done.is_set():
        try:
            FileLock(path).acquire(timeout=0.2, poll_interval=0.01)
        except Timeout:
            continue


@contextmanager
def waiting(
    run: Callable[[Path, threading.Event], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Have another thread stand for the main one, and wait until it polls."""
    done = threading.Event()
    thread = threading.Thread(target=run, args=(path, done))
    thread.start()
    monkeypatch.setattr(here, "main_thread", thread.ident)
    try:
        yield
    finally:
        done.set()
        path.unlink(missing_ok=True)
        thread.join()


def lock_of(row: str) -> str | None:
    """Return the kind of the lock that is found within a while: a look may fall between two turns of the loop."""
    run, name = row.split()
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        path = Path(place, name)
        path.touch()
        with FileLock(path) if run == "ask_kernel" else nullcontext(), waiting(globals()[run], path, patched):
            limit = time.monotonic() + (5 if name.endswith(".lock") and run != "sleep_only" else 0.5)
            while time.monotonic() < limit:
                if found := waits.lock():
                    assert found["path"] == str(path)
                    return found["kind"]
    return None


SETS = """
import os
def read():
    return os.environ["MASTER_PORT"]
def main():
    read()
    {line}
    return 1
"""


def line_that_sets(line: str) -> int | None:
    """Return the line that is found to have set another port; where the launcher's holds, nothing is searched."""
    code = compile(SETS.format(line=line), "/job/train.py", "exec")
    assert frames.is_user_file(code.co_filename)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(MASTER_VARIABLE, "node0:29500")
        patched.setenv("MASTER_ADDR", "node0")
        patched.setenv("MASTER_PORT", "29999")
        place = waits._setting_line([code])
        patched.setenv("MASTER_PORT", "29500")
        assert (waits._setting_line([code]), waits.store()) == (None, None)
    return None if place is None else place["l"]


test_words = words(__name__, line_that_sets=line_that_sets, asked_to_end=asked_to_end, lock_of=lock_of)
