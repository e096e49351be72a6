"""What a rank says of its stack, of errors and of what it waits for."""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout
from torch.utils.file_baton import FileBaton

import ddpdoctor.recorder
from ddpdoctor.collect.proc import read_io
from ddpdoctor.collect.rank_steps import errors_of_child
from ddpdoctor.recorder import errors, frames, waits
from ddpdoctor.recorder.errors import reason_of
from ddpdoctor.recorder.sampler import Sampler, write_quietly
from ddpdoctor.recorder.state import MASTER_VARIABLE, here
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.scenarios.harmless.alone import make_folder, read_rings, run_recorded

# What the recorder can say of an error while the script still has it in hand.


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


def asked_from_another_thread() -> object:
    answers = []
    asker = threading.Thread(target=lambda: answers.append(errors.handled_now()))
    asker.start()
    asker.join()
    return answers[0]


def read_shard() -> None:
    raise ValueError("bad shard")


def test_the_error_that_the_main_thread_handles_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(here, "main_thread", threading.get_ident())
    assert asked_from_another_thread() is None
    try:
        read_shard()
    except ValueError:
        reported = asked_from_another_thread()
    assert (reported["type"], reported["text"]) == ("ValueError", "bad shard")
    assert reported["frames"][-1]["n"] == "read_shard"
    assert asked_from_another_thread() is None


def test_the_error_under_which_a_call_begins_is_noted_once_and_the_time_of_the_last_such_call(
    ring: Ring, monkeypatch
) -> None:
    monkeypatch.setattr(here, "main_thread", threading.get_ident())
    monkeypatch.setattr(errors, "_handled", {})
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


def test_an_error_under_which_the_script_trains_explains_no_call(ring: Ring, monkeypatch) -> None:
    monkeypatch.setattr(here, "main_thread", threading.get_ident())
    monkeypatch.setattr(errors, "_handled", {})
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


def test_a_forked_child_notes_its_errors_however_many_its_parent_had(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    run_recorded(folder, "-c", FORKS)
    (child,) = read_rings(folder, ring_layout.ROLE_CHILD)
    assert [note["text"] for note in child.notes if note["k"] == "raised"] == ["of the child"]


LEAVES = """
import os, sys, tempfile
script = os.path.join(tempfile.mkdtemp(), "script.py")
with open(script, "w") as file:
    file.write("import sys\\nleave = lambda status: sys.exit(status)\\n")
sys.path.insert(0, os.path.dirname(script))
import script
script.leave("no access to https://me:hunter2@host with password=hunter2, " + "x" * 50 + " hf_hunter2hunter2hunter2")
"""


def test_the_text_with_which_a_script_exits_is_stored_without_secrets(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    ended = run_recorded(folder, "-c", LEAVES)
    assert (ended.status, b"hunter2" in ended.stderr) == (1, True)
    (ring,) = read_rings(folder)
    assert [note["status"][:26] for note in ring.notes if note["k"] == "exit"] == ["'no access to https://me:***"[:26]]
    assert [path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()] == []


THREAD = """
import faulthandler, os, signal, sys, threading, time
def watch():
    while {seconds} and sys._current_frames()[main].f_code.co_name != "stands":
        pass
{end}
def stands():
    time.sleep({seconds})
main = threading.get_ident()
threading.Thread(target=watch, daemon=True).start()
stands()
"""
ENDS = [
    # what another thread does, the exit status, who is noted, and where the main thread was
    ("    os._exit(3)", 600, 3, "watch", "stands"),
    ("    os._exit(0)", 600, 0, None, None),
]


@pytest.mark.parametrize(("end", "seconds", "status", "place", "main"), ENDS)
def test_a_thread_that_ends_the_process_is_noted_with_the_main_threads_stack(
    tmp_path: Path, end: str, seconds: int, status: int, place: str | None, main: str | None
) -> None:
    folder = make_folder(tmp_path / "run")
    assert run_recorded(folder, "-c", THREAD.format(end=end, seconds=seconds)).status == status
    (ring,) = read_rings(folder)
    noted = next((note for note in ring.notes if note["k"] == "ended_by_thread"), None)
    assert (noted["frame"]["n"] if noted else None) == place
    if main is not None:
        assert [frame["n"] for frame in noted["stack"]] == ["<module>", main]


@pytest.mark.parametrize(("exits", "limit"), [("exit=True", True), ("exit=False", False), ("file=f, exit=True", True)])
def test_faulthandlers_own_limit_is_published_until_it_is_cancelled(tmp_path: Path, exits: str, *, limit: bool) -> None:
    text = "import faulthandler, os\nf = open('/dev/null', 'w')\nfaulthandler.dump_traceback_later(900, {})\n"
    folder = make_folder(tmp_path / "run")
    run_recorded(folder, "-c", text.format(exits) + "os._exit(0)")
    (ring,) = read_rings(folder)
    assert (ring.cells["own_limit_ns"] > ring.cells["started_ns"] + 900e9) is limit
    again = make_folder(tmp_path / "again")
    run_recorded(again, "-c", text.format(exits) + "faulthandler.cancel_dump_traceback_later()\nos._exit(0)")
    assert read_rings(again)[0].cells["own_limit_ns"] == 0


FAMILY = """
import os, subprocess, sys
def child(*arguments):
    subprocess.run([*arguments, sys.executable, "evaluate.py"], check=False)
child()
child("bash", "-c", '"$@"; exit $?', "-")
subprocess.run([sys.executable, "-c", "raise KeyError"], check=False)
"""


def test_the_scripts_that_a_rank_runs_are_its_children_and_leave_their_errors(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(FAMILY)
    Path("evaluate.py").write_text("def load():\n    raise LookupError('no weights')\nload()\n")
    folder = make_folder(tmp_path / "run")
    run_recorded(folder, "train.py")
    (rank,) = read_rings(folder)
    children = read_rings(folder, ring_layout.ROLE_CHILD)
    found = [pair for child in children for pair in errors_of_child(child)]
    assert [(pid, error["error"]["text"]) for pid, error in found] == [(rank.pid, "no weights")] * 2


GIVES_UP = """
import os, sys
sys.path.insert(0, os.getcwd())
import script
"""
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


def test_an_error_that_a_script_had_before_it_exited_and_called_is_the_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    folder = make_folder(tmp_path / "run")
    run_recorded(folder, "-c", GIVES_UP)
    (ring,) = read_rings(folder)
    last = [note for note in ring.notes if note["k"] == "raised"][-1]
    assert (last["type"], last["call"], last["first"]["text"]) == ("RuntimeError", "barrier", "no such shard")
    assert last["first"]["frames"][-1]["n"] == "run"


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


def reason(error: BaseException, rank: int = 0, in_calls: tuple[BaseException | None, ...] = ()) -> Any:
    return reason_of(error, rank, in_calls.__contains__)


@pytest.mark.parametrize(
    ("stage", "kind", "passed_on"),
    [
        (bad_stage, "ValueError", "RuntimeError"),
        (library("def inner(): raise OSError('no route')", "inner"), "RuntimeError", ""),
    ],
)
def test_what_a_library_wraps_is_the_error_of_the_users_line_but_not_one_of_its_own(
    stage: Callable[[], None], kind: str, passed_on: str
) -> None:
    found = reason(raised_by(lambda: library()(stage)))
    assert (type(found.error).__name__, found.passed_on) == (kind, passed_on)
    assert (found.frames[-1]["n"] == "bad_stage") is bool(passed_on)


def test_the_error_of_a_recorded_call_is_found_through_its_wrapping() -> None:
    error = raised_by(lambda: library()(bad_collective))
    assert reason(error, in_calls=(error.__cause__,)).error is error.__cause__


@pytest.mark.parametrize(("rank", "kind", "passed_on"), [(1, "ValueError", "CheckpointException"),
                                                         (0, "CheckpointException", "")])  # fmt: skip
def test_of_errors_of_all_ranks_each_has_its_own(rank: int, kind: str, passed_on: str) -> None:
    own = raised_by(bad_stage)
    gathered = CheckpointException({1: (own, traceback.extract_tb(own.__traceback__))})

    def fail() -> None:
        raise gathered

    found = reason(raised_by(fail), rank)
    assert (type(found.error).__name__, found.passed_on, found.ranks) == (kind, passed_on, [1])
    assert (found.frames[-1]["n"] == "bad_stage") is (rank == 1)


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


OWN = ValueError("no such sample")
IN_GROUP = raised_by(bad_stage)
GROUP = type("BaseExceptionGroup", (Exception,), {"exceptions": (IN_GROUP,)})("unhandled errors in a TaskGroup")


@pytest.mark.parametrize(
    ("error", "in_call", "expected"),
    [
        (wrapped(cause=True, own=OWN), False, ("KeyError", OWN)),
        (wrapped(cause=False, own=ValueError("a default is used")), False, ("KeyError", None)),
        (cleaned_up(OWN), True, ("RuntimeError", OWN)),
        (cleaned_up(StopIteration()), True, ("RuntimeError", None)),
        (cleaned_up(OWN), False, ("RuntimeError", None)),
        (raised_by(lambda: fail(GROUP)), False, ("BaseExceptionGroup", IN_GROUP)),
    ],
    ids=["cause", "context of its own code", "context of a call that fails now", "end of a loop", "no call", "group"],
)
def test_what_a_script_raises_itself_stays_as_it_is_and_its_first_error_is_found(
    error: BaseException, *, in_call: bool, expected: tuple[str, Any]
) -> None:
    found = reason_of(error, 0, ().__contains__, in_call=in_call)
    assert (type(found.error).__name__, found.passed_on, found.first) == (expected[0], "", expected[1])


@pytest.mark.parametrize("cause", [True, False])
def test_what_a_script_makes_of_the_error_of_a_call_is_that_error(*, cause: bool) -> None:
    lost = raised_by(bad_collective)
    error = wrapped(cause=cause, own=lost)
    found = reason(error, in_calls=(lost,))
    assert (found.error, found.passed_on, found.first) == (lost, "KeyError", None)


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


WAITS = [
    (takes, ["takes"]),
    (through_task, ["through_task", "takes"]),
    (gathers, ["gathers", "takes"]),
    (with_limit, ["with_limit", "takes"]),
    (first_of, ["first_of", "takes"]),
    (comprehends, ["comprehends"]),
]


@pytest.mark.parametrize(("wait", "expected"), WAITS)
@pytest.mark.parametrize("way", ["run", "until", "forever"])
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


def test_a_thread_that_runs_no_loop_awaits_nothing():
    assert waits.awaited(threading.get_ident()) == []


async def fails(text):
    raise LookupError(text)


def test_the_error_of_a_held_task_counts_until_it_is_read(monkeypatch):
    monkeypatch.setattr(waits, "_kept", waits.deque())

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


BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"
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
    for name in ("rings", "evidence"):
        (folder / name).mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(BOOTSTRAP), "DDPDOCTOR_RUN": str(folder), "RANK": "0"}
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, env={**environment, **env}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if "there" in said:
        process.terminate()
    said += process.communicate(timeout=200)[0]
    words = [path.read_text() for path in (folder / "evidence").glob("*.term")]
    return process.returncode, said.split(), "".join(words)


ASKED_TO_END = {
    # the script, its environment, how it ends, what it says, and whether it leaves its stack
    "it leaves its stack and dies of the signal": (WAIT + "wait()\n", {}, -signal.SIGTERM, ["there"], True),
    "torchrun's agent pauses": (
        WAIT + "wait()\n", {"DDPDOCTOR_AGENT": str(os.getpid())}, -signal.SIGTERM, ["there"], False
    ),
    "a handler of its own": (WAIT + OWN_LAST_WORDS, {}, 4, ["there", "own"], False),
    "a handler of its loop": (WAIT + LOOP, {}, 0, ["there", "asked"], False),
    "a forked child says nothing in its parent's name": (FORK, {}, 0, [str(-signal.SIGTERM)], False),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED_TO_END)
def test_a_rank_that_is_asked_to_end(case, tmp_path):
    text, env, status, said, leaves = ASKED_TO_END[case]
    *ended, words = end(tmp_path, text, **env)
    assert (ended, bool(words), " in wait\n" in words) == ([status, said], leaves, leaves)
    assert not (env and list((tmp_path / "evidence").glob("*.term"))), "nothing is registered"


def test_faulthandler_is_the_scripts_own_to_use(tmp_path):
    status, _, words = end(tmp_path, WAIT + FAULTHANDLER + "wait()\n")
    assert (status, words) == (-signal.SIGTERM, "")
    assert "in wait" in (tmp_path / "own.txt").read_text()


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
state.queries["groups"] = lambda: os._exit(7)  # as a query that never comes back
one.answer(1)
"""


def test_both_looks_are_on_disk_before_torch_is_asked(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], env={"DDPDOCTOR_RUN": str(tmp_path)}, check=False)
    (answer,) = (json.loads(path.read_text()) for path in (tmp_path / "evidence").glob("*.json"))
    assert done.returncode == 7
    assert len(answer["looks"]) == 2
    assert "complete" not in answer


def test_torch_is_not_asked_in_a_child_of_a_rank(tmp_path: Path) -> None:
    program = ASKED.replace("is_rank", "is_child")
    subprocess.run([sys.executable, "-c", program], env={"DDPDOCTOR_RUN": str(tmp_path)}, check=True)
    (answer,) = (json.loads(path.read_text()) for path in (tmp_path / "evidence").glob("*.json"))
    assert answer["complete"] == 1


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


def seen() -> dict[str, str] | None:
    """Return the lock that is found within a while: a look may fall between two turns of the loop."""
    limit = time.monotonic() + 5
    while time.monotonic() < limit:
        found = waits.lock()
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(("run", "kind"), [(poll, "own-loop"), (baton, "marker"), (ask_kernel, "kernel")])
def test_the_lock_file_of_a_loop_is_named(
    run: Callable[[Path, threading.Event], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "build.lock"
    path.touch()
    with FileLock(path) if kind == "kernel" else tmp_path.joinpath("other").open("w"):  # noqa: SIM117 - held meanwhile
        with waiting(run, path, monkeypatch):
            assert seen() == {"path": str(path), "kind": kind}


@pytest.mark.parametrize(("run", "name"), [(wait_for_other_file, "block.bin"), (sleep_only, "build.lock")])
def test_what_is_no_lock_or_is_not_looked_for_is_not_named(
    run: Callable[[Path, threading.Event], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.touch()
    with waiting(run, path, monkeypatch):
        assert [waits.lock() for _ in range(50)] == [None] * 50


SETS = """
import os
def read():
    return os.environ["MASTER_PORT"]
def main():
    read()
    {line}
    return 1
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("os.environ['MASTER_PORT'] = '29999'", 7),
        ("os.environ.update(MASTER_PORT='29999', X='1')", 7),
        ("os.environ.update({'MASTER_PORT': '29999'})", 7),
        ("os.environ['MASTER_ADDR'] = 'node0'", None),
        ("print(os.environ['MASTER_PORT'])", None),
    ],
)
def test_the_line_that_sets_another_port_is_found(
    line: str, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MASTER_VARIABLE, "node0:29500")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29999")
    code = compile(SETS.format(line=line), str(tmp_path / "train.py"), "exec")
    assert frames.is_user_file(code.co_filename)
    place = waits._setting_line([code])
    assert (place["l"] if place is not None else None) == found


def test_nothing_is_searched_where_the_launchers_address_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASTER_VARIABLE, "node0:29500")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert waits._replaced() == []
    assert waits.store() is None
