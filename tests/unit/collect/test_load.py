"""How busy a machine is with what is not ours, from /proc/stat as recorded and from this machine."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from subprocess import PIPE

import pytest

from ddpdoctor.collect.machine.load import (
    OwnTimes,
    find_busy,
    own_work,
    parse_cpu_times,
    read_governors,
    read_load,
    read_own_times,
    steal_share,
)
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.system import System
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.limits import BusyCpu, Governor, Load
from ddpdoctor.model.reading import NotRead, Why
from tests.machines import RecordedCalls

PLAN = ReadingPlan(sections=frozenset({"load"}))
HEAD = "cpu  0 0 0 0 0 0 0 0 0 0\n"


def stat(*lines):
    return parse_cpu_times(HEAD + "".join(f"cpu{number} {line}\n" for number, line in enumerate(lines)) + "ctxt 1\n")


def shares(before, after, own=None):
    return {one.cpu: round(one.share, 2) for one in find_busy(before, after, 1.0, own or {})}


START = stat("1000 0 500 9000 50 1 2 0 0 0", "1000 0 500 9000 50 1 2 0 0 0")


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("1000 0 500 9100 50 1 2 0 0 0", 0),  # idle for the whole second
        ("1000 0 500 9000 150 1 2 0 0 0", 0),  # waiting for a disk computes nothing
        ("1097 0 500 9003 50 1 2 0 0 0", 0.97),
        ("1000 0 550 9050 50 1 2 0 0 0", 0.5),  # the kernel
        ("1000 40 500 9060 50 1 2 0 0 0", 0.4),  # niced
        ("1000 0 500 9070 50 1 2 30 0 0", 0.3),  # the hypervisor
        ("1003 0 500 9097 50 1 2 0 0 0", 0),  # what a daemon does in passing
    ],
)
def test_what_a_processor_did(line, share):
    assert shares(START, stat(line, "1000 0 500 9100 50 1 2 0 0 0")).get(0, 0) == share


def test_a_kernel_that_does_not_count_idle_time_to_the_tick_gives_no_more_than_all():
    assert shares(START, stat("1100 0 500 8999 50 1 2 0 0 0", "1000 0 500 9100 50 1 2 0 0 0")) == {0: 1.0}


def test_our_own_work_is_taken_off():
    busy = stat("1100 0 500 9000 50 1 2 0 0 0", "1050 0 500 9050 50 1 2 0 0 0")
    assert shares(START, busy, {0: 1.0, 1: 0.5}) == {}
    assert shares(START, busy, {1: 0.5}) == {0: 1.0}


def test_a_thread_of_ours_that_moved_leaves_nothing_behind():
    busy = stat("1060 0 500 9040 50 1 2 0 0 0", "1040 0 500 9060 50 1 2 0 0 0")
    assert shares(START, busy, {0: 1.0}) == {}


def test_work_is_counted_where_a_thread_was_seen_last_and_that_of_new_threads_as_a_whole():
    before = OwnTimes(seconds={"7/7": 5.0, "7/8": 1.0}, cpus={"7/7": 0, "7/8": 0})
    after = OwnTimes(seconds={"7/7": 5.25, "9/9": 0.5}, cpus={"7/7": 1, "9/9": 1})
    assert own_work(before, after) == {1: 0.75}


def test_what_the_hypervisor_took():
    assert steal_share(stat("60 0 20 9000 0 0 0 20 0 0").values()) == 0.2
    assert steal_share(stat("0 0 0 0 0 0 0 0 0 0").values()) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "this system does not report how busy its processors are"),
        (HEAD + "cpu0 0 0 0 0 0 0 0 0 0 0", "/proc/stat does not change here, as in a sandbox"),
    ],
)
def test_a_system_that_does_not_count(tmp_path, text, reason):
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc" / "stat").write_text(text)

    with pytest.raises(NotRead) as missing:
        read_load(System(root=tmp_path, calls=RecordedCalls()), PLAN)

    assert (missing.value.unread.why, missing.value.unread.reason) == (Why.ABSENT, reason)


def test_governors(tmp_path):
    for cpu, name in enumerate(["powersave", "powersave", "performance"]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{name}\n")
        (folder / "scaling_driver").write_text("acpi-cpufreq\n")

    seen = read_governors(System(root=tmp_path, calls=RecordedCalls(answers={"cpus": "0-2"})))

    assert seen == (
        Governor(name="performance", driver="acpi-cpufreq", preference="", cpus=1),
        Governor(name="powersave", driver="acpi-cpufreq", preference="", cpus=2),
    )
    assert read_governors(System(root=tmp_path, calls=RecordedCalls(answers={"cpus": "3"}))) == ()


def test_what_is_read_can_be_sent():
    seen = Load(
        window_s=0.4, busy=(BusyCpu(cpu=3, share=0.5),), steal_share=None,
        governors=(Governor(name="performance", driver="", preference="", cpus=1),),
    )  # fmt: skip
    assert decode(Load, json.loads(json.dumps(encode(seen)))) == seen


READER = """
import json, sys
from ddpdoctor.collect.machine.load import own_pids
from ddpdoctor.collect.system import System
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(sorted(own_pids(System()))))
"""


@contextmanager
def python(*arguments):
    process = subprocess.Popen([sys.executable, *arguments], stdin=PIPE, stdout=PIPE, text=True)
    with process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_whose_work_is_ours():
    waiting = "print('ready', flush=True); input()"
    with python("-c", READER) as rank, python("-c", READER) as twin, python("-c", waiting) as other:
        ours = json.loads(rank.communicate("go\n")[0])
        twin.stdin.close()
    assert {rank.pid, twin.pid, os.getpid()} <= set(ours)
    assert other.pid not in ours


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_work_of_a_child_is_ours():
    before = read_own_times(System())
    with python("-c", "print('working', flush=True)\nwhile True: pass"):
        while sum(own_work(before, read_own_times(System())).values()) < 0.1:
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
def test_this_machine():
    seen = read_load(System(), PLAN)

    assert seen.window_s > 0
    assert all(0 < one.share <= 1 and one.cpu < os.cpu_count() for one in seen.busy)
