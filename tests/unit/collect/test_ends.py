"""How processes ended, from what is left of them; and who of those that were asked to end had a launcher ask it."""

import os
import signal
import subprocess
import sys

import pytest

from ddpdoctor.collect.proc import read_exit_code, read_process
from ddpdoctor.collect.run.agent_log import End
from ddpdoctor.collect.run.ends import find_ends, interruption_ns, stop_of_others
from ddpdoctor.collect.run.sources import Source
from ddpdoctor.collect.run.watched import WatchedJob, parse_watch
from ddpdoctor.recorder.storage.ring_layout import RANK_SHAPE, ROLE_RANK
from ddpdoctor.recorder.storage.ring_reading import read_ring_file
from ddpdoctor.recorder.storage.ring_writing import Ring

PID = 100
GONE = 5_000_000_000
MS = 1_000_000


def source(pid=PID, **more):
    return Source(pid=pid, rank=0, local_rank=0, world_size=None, **more)


def recorded(folder, *notes, **cells):
    ring = Ring(str(folder), ROLE_RANK, RANK_SHAPE, PID, 7)
    for note in notes:
        ring.note(note)
    for name, value in cells.items():
        ring.set(name, value)
    return {PID: read_ring_file(folder / f"{PID}-7.ring")}


RAISED = {"k": "raised", "uncaught": 1, "main": 1}


@pytest.mark.parametrize(
    ("notes", "cells", "code"),
    [
        ((), {"main_ended_ns": 1}, 0),
        ((RAISED,), {"main_ended_ns": 1}, 1),
        (({"k": "exit", "status": "3"},), {}, 3),
        (({"k": "exit", "status": "None"},), {}, 0),
        (({"k": "exit", "status": "'no data'"},), {}, 1),
        (({"k": "raised", "uncaught": 0, "main": 1},), {}, None),
        ((), {}, None),
    ],
)
def test_a_process_says_itself_how_it_left(notes, cells, code, tmp_path):
    contents = recorded(tmp_path, *notes, **cells)
    watch = parse_watch({"processes": {str(PID): {"ended_ns": GONE}}})
    ends = find_ends([source()], contents, tmp_path, watch, {})
    assert ends == ({} if code is None else {PID: End(pid=PID, code=code, at=GONE)})


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("100-7.dump", "Fatal Python error: Segmentation fault\n\nThread 0x1", -signal.SIGSEGV),
        ("100-7.dump", "Fatal Python error: Aborted\n", -signal.SIGABRT),
        ("100-7.term", "Stack (most recent call first):\n", -signal.SIGTERM),
    ],
)
def test_what_it_wrote_at_a_signal_shows_which_it_was(file, text, code, tmp_path):
    contents = recorded(tmp_path)
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / file).write_text(text)
    watch = parse_watch({"processes": {str(PID): {"ended_ns": GONE}}})
    assert find_ends([source()], contents, tmp_path, watch, {})[PID].code == code


@pytest.mark.parametrize(("status", "code"), [(137, -9), (-9, -9), (139, -11), (1, None), (0, None), (None, None)])
def test_the_launchers_status_explains_the_one_end_that_nothing_else_does(status, code, tmp_path):
    contents = recorded(tmp_path)
    watch = parse_watch({"processes": {str(PID): {"ended_ns": GONE}}, "launcher_status": status})
    assert find_ends([source()], contents, tmp_path, watch, {}) == (
        {} if code is None else {PID: End(pid=PID, code=code, at=GONE)}
    )


def test_two_ends_that_nobody_saw_stay_unknown(tmp_path):
    watch = parse_watch({"processes": {"100": {"ended_ns": GONE}, "101": {"ended_ns": GONE}}, "launcher_status": 137})
    assert find_ends([source(100), source(101)], {}, tmp_path, watch, {}) == {}


@pytest.mark.parametrize(("status", "code"), [(137, -9), (3, 3)])
def test_a_rank_behind_a_shell_ends_as_the_shell_says(status, code, tmp_path):
    known = {50: End(pid=50, code=status, at=GONE)}
    ends = find_ends([source(stands_for=50)], recorded(tmp_path), tmp_path, WatchedJob(), known)
    assert ends[PID] == End(pid=PID, code=code, at=GONE)


def test_what_the_kernel_said_goes_before_what_was_worked_out(tmp_path):
    contents = recorded(tmp_path, RAISED)
    watch = parse_watch({"processes": {str(PID): {"ended_ns": GONE, "code": -9}}})
    assert find_ends([source()], contents, tmp_path, watch, {})[PID].code == -9


def at(code, ms):
    return End(pid=0, code=code, at=GONE + ms * MS)


@pytest.mark.parametrize(
    ("ends", "stop_ms"),
    [
        ({}, None),
        ({1: at(1, 0)}, None),
        ({1: at(1, 0), 2: at(-15, 100)}, 100),
        ({1: at(-9, 0), 2: at(-15, 100), 3: at(-15, 105)}, 100),
        ({1: at(-15, 0), 2: at(-15, 200), 3: at(-15, 201)}, 200),
        ({1: at(-15, 0), 2: at(-15, 5)}, 0),
        ({1: at(-15, 0)}, None),
        ({1: at(0, 0), 2: at(-15, 100)}, None),
    ],
)
def test_ranks_asked_to_end_after_another_failed_were_stopped_by_the_launcher(ends, stop_ms):
    found = stop_of_others([source(pid) for pid in ends], ends, WatchedJob())
    assert found == (None if stop_ms is None else GONE + stop_ms * MS)


@pytest.mark.parametrize(("interrupted_ms", "stop_ms"), [(5, -20), (-300, -300), (60_000, 60_000)])
def test_a_signal_to_the_whole_group_stops_every_rank(interrupted_ms, stop_ms):
    ends = {1: at(-15, 0), 2: at(-15, 200), 3: at(1, -400)}
    watch = parse_watch(
        {"interrupted_ns": GONE + interrupted_ms * MS, "processes": {"1": {"ended_ns": GONE - 20 * MS}}}
    )
    assert interruption_ns([source(pid) for pid in ends], ends, watch) == GONE + stop_ms * MS


def test_nobody_interrupted_a_job_whose_rank_was_killed():
    assert interruption_ns([source(1)], {1: at(-15, 0)}, WatchedJob()) is None


@pytest.mark.parametrize(("line", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_the_kernel_says_how_a_process_ended_while_it_is_a_zombie(line, code):
    child = subprocess.Popen([sys.executable, "-S", "-c", f"input()\n{line}"], stdin=subprocess.PIPE)
    process = read_process(child.pid)
    assert process is not None
    assert read_exit_code(child.pid, process.start_ticks, None) is None
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_exit_code(child.pid, process.start_ticks, None) == code
    assert read_exit_code(child.pid, process.start_ticks + 1, None) is None
    child.wait()


def test_a_process_that_is_gone_says_nothing_without_a_pidfd():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    assert read_exit_code(child.pid, 1, None) is None
