"""Processes beside a rank: who they are, whether they run, and how they ended."""

import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from ddpdoctor.collect.proc import read_process
from ddpdoctor.probes.bandwidth.processes import Home, LocalRanks, describe_end, read_home
from tests.scenarios.running import wait_for

SLEEPS = "import time; print(flush=True); time.sleep(300)"


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def local_ranks():
    found = LocalRanks(read_home())
    yield found
    found.close()


def home_of(process):
    return Home(space=read_home().space, pid=process.pid, started_ticks=read_process(process.pid).start_ticks)


def test_a_local_rank_that_runs_is_stopped_and_dies(sleeper, local_ranks):
    local_ranks.add(1, home_of(sleeper))
    assert (local_ranks.ranks, local_ranks.unable(), local_ranks.gone()) == ((1,), frozenset(), frozenset())
    sleeper.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: local_ranks.states() == {1: "T"})
    assert (local_ranks.unable(), local_ranks.gone()) == ({1}, frozenset())
    sleeper.kill()
    assert wait_for(lambda: local_ranks.gone() == {1})
    assert local_ranks.ends == {1: "SIGKILL"}
    sleeper.wait()
    assert local_ranks.states() == {1: ""}
    assert local_ranks.ends == {1: "SIGKILL"}


def test_the_end_of_a_local_rank_wakes(sleeper, local_ranks):
    descriptor = local_ranks.add(1, home_of(sleeper))
    if descriptor is None:
        pytest.skip("this kernel has no pidfd_open")
    sleeper.kill()
    assert select.select([descriptor], [], [], 20)[0] == [descriptor]


def test_a_pid_that_another_process_has_now_is_no_local_rank(sleeper, local_ranks):
    home = home_of(sleeper)
    local_ranks.add(1, replace(home, started_ticks=home.started_ticks - 1))
    assert local_ranks.states() == {1: ""}


@pytest.mark.parametrize("own", [None, Home(space="another machine", pid=1, started_ticks=1)])
def test_a_process_of_another_space_is_not_looked_at(sleeper, own):
    local_ranks = LocalRanks(own)
    assert local_ranks.add(1, home_of(sleeper)) is None
    assert (local_ranks.ranks, local_ranks.states()) == ((), {})


@pytest.mark.parametrize(
    ("wait_status", "words"),
    [(0, "exit status 0"), (3 << 8, "exit status 3"), (9, "SIGKILL"), (11 | 128, "SIGSEGV"), (40, "signal 40")],
)
def test_ends(wait_status, words):
    assert describe_end(wait_status) == words
