"""What the rank that reports says of the processes beside it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from ddpdoctor.collect.proc import read_process
from ddpdoctor.model.bandwidth import Ending, Stop
from ddpdoctor.probes.bandwidth.processes import LocalRanks, read_home
from ddpdoctor.probes.bandwidth.stopping import Alarm, Reporting, stop_alone
from ddpdoctor.probes.bandwidth.tracker import Tracker, take_position
from tests.scenarios.running import wait_for


@pytest.fixture
def beside():
    """A process beside this one, and this one's view of it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    own, stat = read_home(), read_process(child.pid)
    local_ranks = LocalRanks(own)
    local_ranks.add(0, replace(own, pid=child.pid, started_ticks=stat.start_ticks))
    yield child, local_ranks
    child.communicate()
    local_ranks.close()


def stop(local_ranks, position):
    """Stop alone, as rank 1; return the status and what was reported."""
    reported: list[Stop] = []
    reporting = Reporting(rank=1, members=(), local_ranks=local_ranks, finish=lambda stop: reported.append(stop) or 1)
    return stop_alone(reporting, Alarm(ending=Ending.FAILED, rank=1, phase="measure", signal=None), position), reported


def test_a_process_that_died_after_the_position_was_taken_is_seen(beside):
    child, local_ranks = beside
    position = take_position(1, Tracker(), None, local_ranks.states(), local_ranks.ends)
    child.kill()
    assert wait_for(lambda: 0 in local_ranks.gone())
    status, (reported,) = stop(local_ranks, position)

    assert status == 1
    assert position.states["0"] not in {"Z", ""}
    assert reported.positions[0].states == {"0": "Z"}
    assert reported.positions[0].ends == {"0": "SIGKILL"}


def test_a_lower_rank_that_exited_by_itself_has_reported_already(beside):
    child, local_ranks = beside
    child.stdin.close()
    assert wait_for(lambda: 0 in local_ranks.gone())

    assert stop(local_ranks, take_position(1, Tracker(), None, {}, {})) == (1, [])
