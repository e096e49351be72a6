"""Slurm's lines in a job's log."""

import pytest

from ddpdoctor.evidence.slurm import SlurmReader
from ddpdoctor.model.evidence import Exited, Fact, Stopped, Trouble
from tests.unit.evidence.reading_lines import read_text


def read(text: str) -> list[Fact]:
    return read_text(SlurmReader(), text)


TASKS = [
    ("srun: error: n042: task 3: Out Of Memory", [(3, "SIGKILL", None, False, True)]),
    ("srun: error: n041: tasks 0-1: Terminated", [(n, "SIGTERM", None, True, False) for n in (0, 1)]),
    ("srun: error: n041: tasks 0,2-3: Exited with exit code 1", [(n, "", 1, False, False) for n in (0, 2, 3)]),
    ("srun: error: n041: task 7: Exited with exit code 137", [(7, "SIGKILL", None, False, False)]),
    ("srun: error: n041: task 7: Segmentation fault (core dumped)", [(7, "SIGSEGV", None, False, False)]),
    ("srun: error: n041: task 7: Aborted (core dumped)", [(7, "SIGABRT", None, False, False)]),
    ("srun: error: n041: task 7: Bus error", [(7, "SIGBUS", None, False, False)]),
    ("12: srun: error: n041: task 7: Killed", [(7, "SIGKILL", None, False, False)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ends"), TASKS)
def test_the_end_of_tasks(text: str, ends: list[tuple[int, str, int | None, bool, bool]]) -> None:
    found = [fact for fact in read(text) if isinstance(fact, Exited)]
    shown = [(one.who.task, one.signal, one.code, one.by_launcher, one.memory) for one in found]
    assert shown == ends
    assert {one.who.host for one in found} <= {"n041", "n042"}


def test_what_is_killed_after_the_step_is_ended_was_told_to() -> None:
    text = (
        "srun: error: n1: task 3: Exited with exit code 1\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: n1: tasks 0-2: Killed\n"
    )
    ends = {fact.who.task: fact.by_launcher for fact in read(text) if isinstance(fact, Exited)}
    assert ends == {0: True, 1: True, 2: True, 3: False}


OOM = [
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4410.0. Some of the step tasks have been OOM Killed.",
    "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=4410.batch. Some of your processes may have been killed",
    "slurmstepd: error: Detected 1 oom-kill event(s) in step 4410.0 cgroup.",
    "slurmstepd: error: Step 4410.0 exceeded memory limit (4300000 > 4194304), being killed",
    "slurmstepd: error: Exceeded job memory limit",
]


@pytest.mark.parametrize("text", OOM)
def test_memory_limits_are_a_trouble_of_the_host(text: str) -> None:
    (fact,) = read(text)
    assert isinstance(fact, Trouble)
    assert (fact.kind, fact.fatal) == ("oom", True)


STOPS = [
    ("*** STEP 912.0 ON g001 CANCELLED AT 2026-03-09T14:02:11 DUE TO TIME LIMIT ***", "time limit"),
    ("*** JOB 912 ON g001 CANCELLED AT 2026-03-09T14:02:11 DUE TO PREEMPTION ***", "preemption"),
    ("*** JOB 912 ON g001 CANCELLED AT 2026-03-09T14:02:11 DUE TO JOB REQUEUE ***", "requeue"),
    ("*** STEP 912.0 ON g001 CANCELLED AT 2026-03-09T14:02:11 ***", "cancelled"),
]


@pytest.mark.parametrize(("text", "by"), STOPS)
def test_who_stopped_a_job(text: str, by: str) -> None:
    (fact,) = read(f"slurmstepd: error: {text}")
    assert isinstance(fact, Stopped)
    assert fact.by == by
    assert fact.time is not None
    assert fact.time.clock == "g001"


def test_a_node_that_failed() -> None:
    words = (
        "*** STEP 9.0 ON g001 CANCELLED AT 2026-03-09T14:02:11 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
    )
    facts = read(f"srun: error: Node failure on g[003,007]\nslurmstepd: error: {words}\n")
    shown = [(fact.kind, fact.who.host) for fact in facts if isinstance(fact, Trouble)]
    assert shown == [("node-failure", "g003"), ("node-failure", "g007"), ("node-failure", "")]


@pytest.mark.parametrize(
    "text",
    [
        "srun: job 4410 queued and waiting for resources", "srun: job 4410 has been allocated resources",
        "srun: Warning: can't honor --ntasks-per-node", "srun: error: n1: tasks 0-99999999999999999999: Terminated x",
        "INFO: see srun: error: handling", "slurmstepd: info: task/affinity", "srun: Step created for StepId=1.0",
    ],
)  # fmt: skip
def test_other_lines_say_nothing(text: str) -> None:
    assert read(text) == []
