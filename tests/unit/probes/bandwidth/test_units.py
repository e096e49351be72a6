"""Who meets whom, which processes stand beside a rank, and what NCCL's log tells."""

import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain, combinations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpdoctor.collect.proc import read_process
from ddpdoctor.model.bandwidth import Ending, NcclLog, Stop
from ddpdoctor.probes.bandwidth.group import START_ALLOWANCE_S, RankGroup, Tracker, take_position
from ddpdoctor.probes.bandwidth.localize import Unit, _Groups, circle_rounds
from ddpdoctor.probes.bandwidth.session import nccl_log_environment, parse_nccl_log, read_nccl_log
from ddpdoctor.probes.bandwidth.watch import Alarm, Home, LocalRanks, Reporting, describe_end, read_home, stop_alone
from tests.machines import DATA
from tests.scenarios.running import wait_for

# What NCCL's own log tells: networks, ways between ranks, NVLink SHARP.


LOGS = DATA / "nccl-logs"


def seen(name):
    return parse_nccl_log((LOGS / f"{name}.txt").read_text(encoding="utf-8"), 3)


def log(network, interfaces, transports, nvls=None):
    return NcclLog(rank=3, network=network, interfaces=interfaces, transports=transports, nvls=nvls)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The second communicator, of two ranks, has no NVLS channels; the first one has.
        ("nvlink8", log("IB", ("mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"), {"P2P/CUMEM": 4}, nvls=True)),
        (
            "ib-gdr",
            log(
                "IBext_v8",
                ("mlx5_0:1", "mlx5_1:1", "mlx5_2:1"),
                {"NET/IBext_v8/GDRDMA": 3, "P2P/IPC": 1},
                nvls=True,
            ),
        ),
        ("ib-no-gdr", log("IB", ("mlx5_0:1",), {"NET/IB": 2})),
        ("sockets", log("Socket", ("eth0", "ens7"), {"NET/Socket": 2, "SHM": 1}, nvls=False)),
        ("no-p2p", log("Socket", ("bond0",), {"SHM": 2})),
        ("no-nvls", log("IB", ("mlx5_0:1",), {"P2P/CUMEM": 2}, nvls=False)),
        ("plugin", log("AWS Libfabric", (), {"NET/AWS Libfabric/GDRDMA": 1, "P2P/direct pointer": 1})),
    ],
)
def test_a_log(name, expected):
    assert seen(name) == expected


def test_cards_as_nccl_2_30_names_them():
    text = (
        "n1:8:8 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1 [1]mlx5_1:1 [RO]; OOB eth0:10.0.0.1<0>\n"
        "n1:8:8 [0] NCCL INFO Using network IB\n"
    )
    assert parse_nccl_log(text, 3) == log("IB", ("mlx5_0:1", "mlx5_1:1"), {})


@pytest.mark.parametrize("text", ["", "\n\n", "NCCL version 2.26.2+cuda12.8\n", "\0\0 Using network IB"])
def test_a_log_that_says_nothing_of_the_network(text):
    assert parse_nccl_log(text, 0) is None


def test_a_communicator_that_never_came_about():
    assert seen("one-rank") is None


def test_lines_that_are_cut_off_or_none_of_nccl_do_no_harm():
    text = (LOGS / "nvlink8.txt").read_text(encoding="utf-8")
    for end in range(0, len(text), 97):
        found = parse_nccl_log(text[:end] + "\nChannel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n", 3)
        assert found is None or found.network == "IB"


def test_the_variables_that_make_nccl_log(tmp_path):
    assert nccl_log_environment({"HOME": "/root", "NCCL_DEBUG": ""}, str(tmp_path / "100%")) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT",
        "NCCL_DEBUG_FILE": f"{tmp_path}/100%%/nccl.%h.%p.log",
    }


@pytest.mark.parametrize("env", [{"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG_FILE": "/tmp/nccl.log"}])
def test_a_user_who_looks_at_the_log_keeps_it(env):
    assert nccl_log_environment(env, "/tmp/x") == {}


def test_the_folder(tmp_path):
    assert read_nccl_log(str(tmp_path), 3) is None
    text = (LOGS / "no-p2p.txt").read_bytes()
    (tmp_path / "nccl.dgx01.4300.log").write_bytes(text + b"\xff\xfe")

    assert read_nccl_log(str(tmp_path), 3) == seen("no-p2p")


# Processes beside a rank: who they are, whether they run, and how they ended.


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


# Everybody meets everybody once, and nobody two at a time.


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 64])
def test_every_pair_meets_once_in_rounds_that_share_nobody(count):
    rounds = circle_rounds(range(count))

    assert len(rounds) == count - 1 + count % 2
    assert sorted(chain.from_iterable(rounds)) == list(combinations(range(count), 2))
    for pairs in rounds:
        assert len(pairs) == count // 2
        assert len(set(chain.from_iterable(pairs))) == 2 * len(pairs)


@pytest.mark.parametrize("ends", [(), ("a",)])
def test_nobody_to_meet(ends):
    assert circle_rounds(ends) == ()


def test_ends_of_any_kind_in_their_order():
    assert set(chain.from_iterable(circle_rounds(("b", "a", "c")))) == {("b", "a"), ("b", "c"), ("a", "c")}


# What the rank that reports says of the processes beside it.


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


# What a tracker says must let ranks be compared: the same count in the same group is the same call.


WORLD, PAIR = (0, 1, 2), (0, 1)


def call(tracker, op, group):
    tracker.enter(op, group)
    tracker.leave()


def test_calls_are_counted_by_group_whatever_lies_between():
    in_pair, alone = Tracker(), Tracker()
    for tracker, groups in ((in_pair, (WORLD, PAIR, PAIR, WORLD)), (alone, (WORLD, WORLD))):
        for group in groups:
            call(tracker, "barrier", group)
    assert (in_pair.group, in_pair.calls) == (alone.group, alone.calls) == (WORLD, 2)


def test_a_call_that_does_not_return_leaves_it_inside():
    tracker = Tracker()
    tracker.enter("all_reduce", WORLD)
    assert (tracker.op, tracker.inside) == ("all_reduce", True)
    tracker.leave()
    assert not tracker.inside


def test_what_comes_next_is_progress_and_sets_what_it_may_take():
    before = time.monotonic()
    tracker = Tracker()
    assert tracker.allowance_s == START_ALLOWANCE_S
    tracker.at("measure", "all_reduce float32 1 GiB", allowance_s=7.0)
    assert (tracker.phase, tracker.what, tracker.allowance_s) == ("measure", "all_reduce float32 1 GiB", 7.0)
    assert tracker.moved_s >= before
    tracker.at("end")
    assert (tracker.what, tracker.allowance_s) == ("", 0.0)


# Groups of the units: made by their own ranks, without a call that holds the GIL on the others.


@pytest.fixture
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    yield RankGroup(None, (0, 1, 2), torch.device("cpu"), "fake", Tracker())
    dist.destroy_process_group()


def test_a_rank_outside_a_group_takes_no_part_in_making_it(world, monkeypatch):
    """torch would have it split the communicator of all ranks, which is bound to a device."""
    bound = torch.device("cuda", 0)
    dist.group.WORLD.bound_device_id = bound
    splits = []
    backend = type(dist.group.WORLD._get_backend(bound))
    monkeypatch.setattr(backend, "supports_splitting", property(lambda _: True))
    monkeypatch.setattr(backend, "perform_nocolor_split", lambda *_: splits.append(1), raising=False)

    dist.new_group([0, 1], backend="fake")
    assert splits == [1], "torch does not split any more, so that there is nothing to avoid"
    _Groups(world).of([Unit(name="ranks 0 and 1", ranks=(0, 1))])

    assert splits == [1]
    assert dist.group.WORLD.bound_device_id == bound
