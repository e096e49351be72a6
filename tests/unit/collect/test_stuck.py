"""Processes that hang in the driver: two looks, and what tells a moment's sleep from a hang."""

import pytest

from ddpdoctor.collect.gpu.stuck import find_stuck, read_stuck
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.system import System
from ddpdoctor.model.gpus import StuckProcess
from ddpdoctor.model.reading import NotRead, Why
from tests.machines import load_machine

PLAN = ReadingPlan(sections=frozenset({"stuck_processes"}))


def no_wait(seconds):
    assert seconds == 1.0


def test_one_that_hangs_and_for_how_long(tmp_path):
    found = find_stuck(load_machine("nvlink8", tmp_path, "stuck"), no_wait)
    assert found == (StuckProcess(pid=777, name="nvidia-smi", wchan="os_acquire_mutex", seconds=245.0),)


def test_without_the_watchdog_only_the_two_looks_count(tmp_path):
    system = load_machine("nvlink8", tmp_path, "stuck")
    (tmp_path / "dev/kmsg").unlink()
    assert [one.seconds for one in find_stuck(system, no_wait)] == [1.0]


def test_nobody_means_one_look(tmp_path):
    def never(_seconds):
        raise AssertionError("nobody was there to look at again")

    assert find_stuck(load_machine("nvlink8", tmp_path), never) == ()


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("stat", ") D ", ") S "),
        ("stat", " 50 10 ", " 51 10 "),
        ("stat", " 9000 ", " 9001 "),
        ("status", "ctxt_switches:\t5", "ctxt_switches:\t6"),
    ],
    ids=["woke", "ran", "another-process", "switched"],
)
def test_one_that_moved_meanwhile_does_not_hang(tmp_path, file, before, after):
    system = load_machine("nvlink8", tmp_path, "stuck")
    path = tmp_path / "proc/777" / file

    def move(_seconds):
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))

    assert find_stuck(system, move) == ()


def test_a_name_that_is_hidden_does_not_hide_a_tool(tmp_path):
    """To other users the kernel gives 0 for the place where a process sleeps."""
    system = load_machine("nvlink8", tmp_path, "stuck")
    (tmp_path / "proc/777/wchan").write_text("0")
    assert [one.wchan for one in find_stuck(system, no_wait)] == [""]


def test_the_stack_shows_what_the_name_does_not(tmp_path):
    system = load_machine("nvlink8", tmp_path, "stuck")
    (tmp_path / "proc/778/stack").write_text("[<0>] rwsem_down_write_slowpath\n[<0>] uvm_ioctl+0x1/0x2 [nvidia_uvm]\n")
    assert [one.pid for one in find_stuck(system, no_wait)] == [777, 778]


def test_a_thread_of_the_kernel_may_sleep(tmp_path):
    system = load_machine("nvlink8", tmp_path, "stuck")
    path = tmp_path / "proc/777/stat"
    path.write_text(path.read_text().replace(") D 1 ", ") D 2 "))
    assert find_stuck(system, no_wait) == ()


def test_without_a_driver_there_is_nothing_to_hang_in(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_stuck(System(root=tmp_path), PLAN)
    assert missing.value.unread.why is Why.ABSENT
