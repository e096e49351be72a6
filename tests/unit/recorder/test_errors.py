"""What the recorder can say of an error while the script still has it in hand."""

import threading
from pathlib import Path

import pytest

from ddpdoctor.collect.rank.steps import errors_of_child
from ddpdoctor.recorder.stacks import errors
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.scenarios.harmless.alone import make_folder, read_rings, run_recorded

FORKS = """
import os
from _ddpdoctor_recorder.stacks import errors
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
    tmp_path: Path, monkeypatch
) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, 42, 7)
    monkeypatch.setattr(here, "ring", ring)
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


def test_an_error_under_which_the_script_trains_explains_no_call(tmp_path: Path, monkeypatch) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, 42, 7)
    monkeypatch.setattr(here, "ring", ring)
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


def test_an_error_at_the_address_of_an_earlier_one_is_noted(tmp_path: Path, monkeypatch) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, 42, 7)
    monkeypatch.setattr(here, "ring", ring)
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
from _ddpdoctor_recorder.stacks import errors
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
