"""What counts as movement between two looks, and what does not."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from ddpdoctor.attach.look import JobLook
from ddpdoctor.attach.moving import compare_looks, of_job
from ddpdoctor.model.attached import (
    JobIdentity,
    Movement,
    Peer,
    ProcessFacts,
    RankLook,
    RankMovement,
    Refusal,
)
from tests.unit.attach.records import seen_rank

SILENT = Refusal(source="/proc", reason="no answer")
NOBODY = 2**22 + 1
"""No process has this pid, so that no further look at it brings anything."""
STORE = 29500


def process(**changes):
    facts = ProcessFacts(
        state="S", cpu_ticks=9, main_cpu_ticks=5, main_switches=7, threads=(), blocked=None, kernel_function=None,
        peers=(), children=(),
    )  # fmt: skip
    return replace(facts, **changes)


def look(number, pid=NOBODY, line=10, **changes):
    rank = seen_rank(pid, pid - NOBODY)
    stacks = [{"pid": pid, "thread_name": "MainThread", "frames": [{"filename": "t.py", "name": "f", "line": line}]}]
    made = RankLook(
        number=number, host="h", wall_ns=0, monotonic_ns=0, job=JobIdentity(name="j", master_port=STORE), rank=rank,
        process=process(), stacks=stacks,
    )  # fmt: skip
    return replace(made, **changes)


def compare(before, after, raws=({}, {})):
    looks = [
        JobLook(number=number, ranks=tuple(ranks), store=None, refused=(), raw=raw)
        for number, ranks, raw in ((1, before, raws[0]), (2, after, raws[1]))
    ]
    return compare_looks(*looks)


def connection(local, remote, received):
    return Peer(local=local, remote=remote, state="established", unsent_bytes=0, retries=0, received_bytes=received)


RAN = process(main_switches=8)


@pytest.mark.parametrize(
    ("after", "movement", "evidence"),
    [
        pytest.param({"line": 11}, Movement.MOVING, ("stack",), id="another line"),
        pytest.param({}, Movement.STILL, ("stack", "slept"), id="asleep at the same line"),
        pytest.param({"process": RAN}, Movement.STILL, ("stack",), id="awake at the same line"),
        pytest.param({"process": None}, Movement.MOVING, ("ended",), id="ended"),
        pytest.param({"process": None, "refused": (SILENT,)}, Movement.STILL, ("stack",), id="/proc gave no answer"),
        pytest.param({"stacks": None}, Movement.STILL, ("slept",), id="asleep, without a stack"),
        pytest.param({"stacks": None, "process": RAN}, Movement.UNKNOWN, (), id="awake, without a stack"),
        pytest.param({"process": process(state="T")}, Movement.STILL, ("stack", "slept"), id="stopped"),
    ],
)
def test_one_rank(after, movement, evidence):
    (told,) = compare([look(1)], [look(2, **after)])
    assert (told.movement, told.evidence) == (movement, evidence)


def test_a_rank_that_was_seen_at_one_line_twice_and_runs_is_looked_at_again():
    many_lines = "import time\nprint('here', flush=True)\nwhile True:\n" + "    time.sleep(0.01)\n" * 500
    ranks = subprocess.Popen([sys.executable, "-c", many_lines], stdout=subprocess.PIPE)
    try:
        ranks.stdout.readline()
        (told,) = compare([look(1, ranks.pid)], [look(2, ranks.pid, process=RAN)])
    finally:
        ranks.kill()
        ranks.communicate()
    assert (told.movement, told.evidence) == (Movement.MOVING, ("stack",))


@pytest.mark.parametrize(
    ("local", "remote", "movement"),
    [
        pytest.param("1.1.1.1:5", "1.1.1.1:6", Movement.MOVING, id="from another rank"),
        pytest.param("1.1.1.1:5", "9.9.9.9:443", Movement.STILL, id="from elsewhere"),
        pytest.param("1.1.1.1:5", f"1.1.1.1:{STORE}", Movement.STILL, id="from the store"),
    ],
)
def test_bytes_count_if_they_come_from_another_rank(local, remote, movement):
    def both(number, received):
        ends = (connection("1.1.1.1:6", local, 0), connection(f"1.1.1.1:{STORE}", local, 0))
        mine = process(peers=(connection(local, remote, received),))
        return [look(number, process=mine), look(number, NOBODY + 1, process=process(peers=ends))]

    assert [one.movement for one in compare(both(1, 10), both(2, 20))] == [movement, Movement.STILL]


def test_a_flight_recorder_that_goes_on():
    name = "fr_trace_pid_1_rank_0.json"
    entries = [{"record_id": 0, "retired": True}, {"record_id": 1, "retired": False}]
    done = [{**one, "retired": True} for one in entries]
    before, after = look(1, files=(name,)), look(2, files=(name,))
    raws = [{name: json.dumps({"entries": some}).encode()} for some in (entries, entries, done)]

    assert compare([before], [after], raws[:2])[0].evidence == ("stack", "flight recorder", "slept")
    assert compare([before], [after], raws[1:])[0].evidence == ("flight recorder",)
    assert compare([before], [after], ({name: b"{"}, {name: b"{"}))[0].evidence == ("stack", "slept")


@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        ("MOVING MOVING", "MOVING"), ("STILL STILL", "STILL"), ("MOVING STILL", "PARTLY"), ("UNKNOWN", "UNKNOWN"),
        ("STILL UNKNOWN", "STILL"), ("MOVING UNKNOWN", "MOVING"),
    ],
)  # fmt: skip
def test_a_job(ranks, job):
    movements = [
        RankMovement(pid=1, rank=0, movement=Movement[one], evidence=(), main_cpu_ticks=None, main_slept=None)
        for one in ranks.split()
    ]
    assert of_job(movements) is Movement[job]
