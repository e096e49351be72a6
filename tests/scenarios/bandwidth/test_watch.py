"""Ranks that are watched end with one report that says where each of them was; healthy ones are left alone."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.store import KeyValues
from ddpdoctor.exchange.wire import NO_TOKEN
from ddpdoctor.model.bandwidth import Ending, Member, Stop
from ddpdoctor.model.codec import decode
from ddpdoctor.probes.bandwidth import watch
from ddpdoctor.probes.bandwidth.collectives import Tracker
from ddpdoctor.probes.bandwidth.watch import Alarm
from tests.scenarios.running import clean_environment, wait_for

RANK = Path(__file__).with_name("watched_rank.py")
REPORTED = 7
"""The status that a report of these ranks asks for."""
LONG_S = 300
"""A hang timeout that no test waits for."""


class Ranks:
    """Ranks, and the server that their launcher would serve."""

    def __init__(self, folder, faults, hang_timeout_s=LONG_S):
        self.folder = folder
        self.server = Server(0, NO_TOKEN, one_host=True)
        reported = [str(len(faults)), str(self.server.port), str(hang_timeout_s)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, RANK, folder, str(rank), *reported, fault],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(),
            )
            for rank, fault in enumerate(faults)
        ]  # fmt: skip

    def come_to(self, call, *ranks):
        assert wait_for(lambda: all((self.folder / f"at-{rank}-{call}").exists() for rank in ranks))

    def send(self, rank, number):
        os.kill(self.processes[rank].pid, number)

    def end(self, *ranks):
        """Wait for some ranks; return their statuses and what all of them have said on stderr.

        None is reaped before all have ended: from its zombie the others read how a rank ended.
        """
        for rank in ranks:
            os.waitid(os.P_PID, self.processes[rank].pid, os.WEXITED | os.WNOWAIT)
        ends = [self.processes[rank].communicate(timeout=200) for rank in ranks]
        return [self.processes[rank].returncode for rank in ranks], "".join(end[1] for end in ends)

    def reports(self):
        """Return by rank what was reported."""
        return {
            int(path.name.removeprefix("report-")): decode(Stop, json.loads(path.read_text()))
            for path in self.folder.glob("report-*")
        }

    def close(self):
        for process in self.processes:
            process.kill()
            process.communicate()
        self.server.close()


@pytest.fixture
def start(tmp_path):
    started = []

    def start_ranks(*faults, **more):
        started.append(Ranks(tmp_path, faults, **more))
        return started[-1]

    yield start_ranks
    for ranks in started:
        ranks.close()


def only_report(ranks):
    reports = ranks.reports()
    assert len(reports) == 1, reports
    return next(iter(reports.items()))


def by_rank(stop):
    return {position.rank: position for position in stop.positions}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["pair", "slow"])
def test_what_takes_long_is_no_hang(start, fault):
    ranks = start(fault, fault, fault, hang_timeout_s=5)
    assert ranks.end(0, 1, 2) == ([0, 0, 0], "")
    assert ranks.reports() == {}


def test_a_rank_that_does_not_come_is_reported_with_its_line(start):
    ranks = start("none", "stuck", "none", hang_timeout_s=3)
    assert ranks.end(0, 1, 2) == ([REPORTED] * 3, "")
    reporter, stop = only_report(ranks)
    at = by_rank(stop)
    stuck = next(number for number, line in enumerate(RANK.read_text().splitlines(), 1) if line.endswith("# STUCK"))
    assert (reporter, stop.ending, stop.phase, stop.signal) == (0, Ending.HUNG, "measure", None)
    assert [(at[rank].inside, at[rank].calls, at[rank].what) for rank in range(3)] == [
        (True, 3, "call 3"), (False, 2, "call 3"), (True, 3, "call 3"),
    ]  # fmt: skip
    assert at[1].stack[-1] == f"{RANK}:{stuck} hold_up"
    assert all(position.stale_s >= 0.5 for position in stop.positions)
    assert sorted(path.name for path in ranks.folder.glob("clean-*")) == ["clean-0", "clean-1", "clean-2"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_does_not_answer_and_its_state_is_reported(start, victim):
    ranks = start(*("stop" if rank == victim else "none" for rank in range(3)), hang_timeout_s=3)
    left = [rank for rank in range(3) if rank != victim]
    assert ranks.end(*left) == ([REPORTED] * 2, "")
    reporter, stop = only_report(ranks)
    assert (reporter, stop.ending, sorted(by_rank(stop))) == (left[0], Ending.HUNG, left)
    assert by_rank(stop)[reporter].states[str(victim)] == "T"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_noticed_at_once(start, victim):
    ranks = start(*("wait" if rank == victim else "none" for rank in range(3)))
    ranks.come_to(3, 0, 1, 2)
    ranks.send(victim, signal.SIGKILL)
    left = [rank for rank in range(3) if rank != victim]
    assert ranks.end(*left) == ([REPORTED] * 2, "")
    reporter, stop = only_report(ranks)
    assert (reporter, stop.ending) == (left[0], Ending.FAILED)
    assert sorted(by_rank(stop)) == left
    # Nobody has waited for the process yet: this test does so only afterwards.
    assert by_rank(stop)[reporter].ends == {str(victim): "SIGKILL"}


def test_a_rank_that_leaves_with_an_error_status_is_reported(start):
    ranks = start("none", "exit")
    assert ranks.end(0) == ([REPORTED], "")
    _, stop = only_report(ranks)
    assert (stop.ending, by_rank(stop)[0].ends) == (Ending.FAILED, {"1": "exit status 3"})


def test_an_exception_is_reported_with_its_line(start):
    ranks = start("none", "raise", "none")
    assert ranks.end(0, 1, 2) == ([REPORTED] * 3, "")
    _, stop = only_report(ranks)
    at = by_rank(stop)
    assert (stop.ending, at[0].error, at[1].error, at[1].inside) == (
        Ending.FAILED, None, "ValueError: no such thing", False,
    )  # fmt: skip
    assert at[1].stack[-1].endswith(" act")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_rank_interrupts_all(start, number):
    ranks = start("none", "wait", "none")
    ranks.come_to(3, 0, 1, 2)
    ranks.send(2, number)
    assert ranks.end(0, 1, 2) == ([REPORTED] * 3, "")
    reporter, stop = only_report(ranks)
    assert (reporter, stop.ending, stop.signal) == (0, Ending.INTERRUPTED, number.name)
    assert sorted(by_rank(stop)) == [0, 1, 2]


def test_a_launcher_that_ends_the_others_of_a_dead_rank_is_no_user(start):
    ranks = start("none", "wait", "none")
    ranks.come_to(3, 0, 1, 2)
    ranks.send(1, signal.SIGKILL)
    ranks.processes[1].wait()
    for rank in (0, 2):
        ranks.send(rank, signal.SIGTERM)
    assert ranks.end(0, 2) == ([REPORTED] * 2, "")
    assert only_report(ranks)[1].ending is Ending.FAILED


def test_a_rank_that_came_to_its_end_is_not_taken_for_dead(start):
    ranks = start("none", "end", "none", hang_timeout_s=3)
    assert ranks.end(0, 1, 2) == ([REPORTED, 0, REPORTED], "")
    _, stop = only_report(ranks)
    assert (stop.ending, by_rank(stop)[1].phase) == (Ending.HUNG, "end")


def test_where_the_store_is_lost_the_lowest_rank_reports_what_it_knows(start):
    ranks = start("wait", "none", "none")
    ranks.come_to(3, 0, 1, 2)
    ranks.server.close()
    ranks.send(0, signal.SIGKILL)
    statuses, _ = ranks.end(1, 2)
    _, stop = only_report(ranks)
    assert stop.ending is Ending.FAILED
    assert len(stop.positions) == 1
    assert set(statuses) <= {REPORTED, 1}


def test_a_report_that_fails_is_said_in_one_line(start):
    ranks = start("badreport", "raise")
    assert ranks.end(0, 1) == (
        [3, 3], "ddpdoctor: the report could not be written: RuntimeError: the disk is full\n",
    )  # fmt: skip


@pytest.mark.nightly
def test_a_rank_in_which_no_python_runs_ends_itself_and_says_where_it_stood(start):
    ranks = start("none", "gil", hang_timeout_s=2)
    statuses, said = ranks.end(0, 1)

    line = next(n for n, text in enumerate(RANK.read_text().splitlines(), 1) if text.endswith("# HOLDS THE GIL"))
    assert statuses == [REPORTED, 1]
    assert "ddpdoctor: rank 1 ended itself: it could no longer run Python" in said
    assert f'watched_rank.py", line {line} in act' in said
    assert "Timeout (" not in said


def test_a_rank_that_asks_the_others_hears_their_alarm(monkeypatch):
    """Who has raised the alarm answers no more, and leaves the report to a lower rank for a few seconds only."""
    monkeypatch.setattr(watch, "ANSWER_LIMIT_S", math.inf)
    conversation = Conversation(KeyValues())
    more = {"host": "here", "pid": 0, "device": "cpu", "device_name": "", "cores": 1, "version": "", "torch": ""}
    members = tuple(Member(rank=rank, local_rank=rank, **more) for rank in range(2))
    watcher = watch.Watcher(
        rank=0, members=members, tracker=Tracker(allowance_s=0.0), conversation=conversation, hang_timeout_s=0.0,
        finish=lambda _: REPORTED, clean_up=lambda: None,
    )  # fmt: skip
    conversation.raise_alarm(Alarm(ending=Ending.HUNG, rank=1, phase="measure"))
    assert watcher._all_stand_still()
