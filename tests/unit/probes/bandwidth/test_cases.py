"""What a bench runs, with which contents, and that the result is right."""

import functools
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
from ddpdoctor.model.bandwidth import BenchSettings, Case, Collective, Ending, Mode, NcclLog, Stop
from ddpdoctor.probes.bandwidth.collectives import (
    PERIODS,
    START_ALLOWANCE_S,
    RankGroup,
    Tracker,
    bus_factor,
    put_in,
    reduced,
    tolerance,
)
from ddpdoctor.probes.bandwidth.localize import Unit, _Groups, circle_rounds
from ddpdoctor.probes.bandwidth.plan import (
    DTYPES,
    REDOPS,
    is_in_place,
    list_cases,
    list_impossible,
    list_sizes,
    possible,
    reducible,
    round_size,
)
from ddpdoctor.probes.bandwidth.session import nccl_log_environment, parse_nccl_log, read_nccl_log
from ddpdoctor.probes.bandwidth.watch import Alarm, Home, LocalRanks, Watcher, describe_end, read_home
from tests.golden import Cases, table, words
from tests.machines import DATA
from tests.scenarios.running import wait_for
from tests.unit.probes.bandwidth.rank_jobs import run_ranks

CASES = Cases(__name__)
test_kept = CASES.test()
KIB, MIB, GIB = 2**10, 2**20, 2**30
ONE_MODE = BenchSettings(modes=(Mode.LATENCY,))


def cases(ranks, *, settings=ONE_MODE, **asked):
    """Return the cases of a bench, of many the first and the last ones, and what is impossible."""
    settings = replace(settings, **asked)
    found = list_cases(settings, ranks)
    shown = [
        f"{one.collective.value} {one.dtype} {one.redop} {one.mode.value} {one.size_bytes} B {one.count} elements"
        for one in (found if len(found) < 20 else [*found[:3], *found[-1:]])
    ]
    return [f"{len(found)} cases", *shown, *list_impossible(settings, ranks)]


test_rows = table("bench_cases", globals())


def rounded(row):
    collective, *sizes = row
    return round_size(Collective(collective), *sizes)


def factors(collective):
    return {ranks: bus_factor(Collective(collective), ranks) for ranks in (1, 2, 4, 8)}


def what_is_in_place(collective):
    return [is_in_place(Collective(collective), asked=asked) for asked in (False, True)]


def reduced_by(row):
    backend, *asked = row
    return [dtype for dtype in (*DTYPES, "float8_e4m3fn", "int16") if reducible(backend, dtype, *asked)]


test_words = words(
    __name__,
    list_sizes=lambda row: list(list_sizes(*row)), round_size=rounded, is_in_place=what_is_in_place, bus_factor=factors,
    reducible=reduced_by,
    possible=lambda row: possible(*row), describe_end=describe_end,
)  # fmt: skip


SIZES = [1, 2, 3, 5, 8, 16, 17, 100, 1000]
COUNT = 4096


def group_of(size):
    return RankGroup(None, tuple(range(size)), torch.device("cpu"), "gloo", Tracker())


def case_of(redop, dtype="float64", count=COUNT):
    return Case(
        collective=Collective.ALL_REDUCE if redop else Collective.ALL_GATHER,
        dtype=dtype,
        redop=redop,
        mode=Mode.LATENCY,
        in_place=True,
        size_bytes=count * torch.empty(0, dtype=getattr(torch, dtype)).element_size(),
        count=count,
    )


def values(pattern, start=0, stop=COUNT):
    return torch.cat(list(pattern.pieces(start, stop)))


COMBINE = {
    "sum": torch.Tensor.add, "avg": torch.Tensor.add, "prod": torch.Tensor.mul, "min": torch.minimum,
    "max": torch.maximum,
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("redop", list(COMBINE))
def test_what_comes_out_is_what_the_ranks_put_in_and_without_one_of_them_another(redop, size):
    """Every partial result is a whole number that int8 and bfloat16 hold."""
    case, group = case_of(redop), group_of(size)
    inputs = [values(put_in(case, group, rank)) for rank in range(size)]
    whole = functools.reduce(COMBINE[redop], inputs)
    assert torch.equal(whole / size if redop == "avg" else whole, values(reduced(case, group)))
    # Nothing is negative: no partial result is larger than the whole.
    assert all(bool((one >= 0).all()) and torch.equal(one, one.round()) for one in inputs)
    assert float(whole.max()) <= 127
    assert torch.equal(whole.to(torch.bfloat16).to(torch.float64), whole)
    for missing in range(size) if 1 < size <= 17 else ():
        assert not torch.equal(functools.reduce(COMBINE[redop], inputs[:missing] + inputs[missing + 1 :]), whole)


def test_what_ranks_put_in_differs_by_rank_and_by_index():
    case, group = case_of(None), group_of(300)
    rows = torch.stack([values(put_in(case, group, rank)) for rank in range(300)])
    # Of random values of 128, one in 128 is equal to another.
    assert float((rows[0] == rows[1]).double().mean()) < 0.02
    assert float((rows[0] == rows[128]).double().mean()) < 0.02
    assert float((rows[:, 1:] == rows[:, :-1]).double().mean()) < 0.02


def test_one_period_is_held_and_the_next_is_another():
    period = PERIODS["cpu"]
    case = case_of(None, "int8", 3 * period)
    pattern = put_in(case, group_of(2), 1)
    whole = values(pattern, 0, 3 * period)
    assert whole.numel() == 3 * period
    assert not torch.equal(whole[:period], whole[period : 2 * period])
    # A part is the same whichever index it is asked from.
    assert torch.equal(values(pattern, period - 10, 2 * period + 10), whole[period - 10 : 2 * period + 10])


def test_only_an_average_over_a_number_that_is_no_power_of_two_may_be_rounded():
    for redop, dtype, size, allowed in (
        ("sum", "bfloat16", 3, 0.0), ("avg", "float32", 2, 0.0), ("avg", "bfloat16", 8, 0.0),
        ("avg", "float32", 3, 2 * 2**-23), ("avg", "bfloat16", 3, 2 * 2**-7),
    ):  # fmt: skip
        assert tolerance(case_of(redop, dtype), group_of(size)) == pytest.approx(allowed)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [3, 5, 7, 100])
def test_an_average_that_is_multiplied_first_or_divided_at_the_end_is_within_the_tolerance(dtype, size):
    case, group, kind = case_of("avg", dtype), group_of(size), getattr(torch, dtype)
    inputs = [values(put_in(case, group, rank)) for rank in range(size)]
    expected = values(reduced(case, group))
    allowed = tolerance(case, group)
    divided = functools.reduce(torch.Tensor.add, inputs) / size
    factor = torch.tensor(1 / size, dtype=kind)
    multiplied = functools.reduce(torch.Tensor.add, [one * factor for one in inputs])
    for result in (divided, multiplied):
        assert result.dtype == kind
        assert bool(torch.isclose(result.to(torch.float64), expected, rtol=allowed, atol=0.0).all())


RANKS = 3
"""Not a power of two: averages are rounded, and shares are not those of the backend's own chunks."""


@CASES
def data_that_were_altered(tmp_path):
    """Every rank names the rank, the place and the count. All that Gloo can do is checked, and right if nothing is."""
    first, *others = run_ranks("check", RANKS, tmp_path)
    reduced = 4 * sum(reducible("gloo", dtype, redop) for dtype in DTYPES for redop in REDOPS)
    carried, large = 5 * len(DTYPES), 7 * 2
    assert first["everything"] == [reduced + carried + large, []]
    seeded = first["seeded"]
    assert all(one["seeded"] == seeded for one in others)
    if reducible("gloo", "float32", "avg"):
        (wrong,) = seeded.pop("avg")
        assert (wrong["rank"], wrong["host"], wrong["index"], wrong["count"]) == (1, "host1", 777, 1)
    return {
        fault: [
            f"rank {one['rank']} on {one['host']}: {one['count']} from {one['index']}"
            + (f", {one['found']} for {one['expected']}" if one["count"] == 1 else "")
            for one in wrong
        ]
        for fault, wrong in seeded.items()
    }


# Who meets whom, which processes stand beside a rank, and what NCCL's log tells.


# What NCCL's own log tells: networks, ways between ranks, NVLink SHARP.


LOGS = DATA / "nccl-logs"


def seen(name):
    return parse_nccl_log((LOGS / f"{name}.txt").read_text(encoding="utf-8"), 3)


def log(network, interfaces, transports, nvls=None):
    return NcclLog(rank=3, network=network, interfaces=interfaces, transports=transports, nvls=nvls)


@CASES
def what_the_log_of_nccl_tells():
    """In nvlink8 the second communicator, of two ranks, has no NVLS channels; the first one has."""
    cards = (
        "n1:8:8 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1 [1]mlx5_1:1 [RO]; OOB eth0:10.0.0.1<0>\n"
        "n1:8:8 [0] NCCL INFO Using network IB\n"
    )
    for text in ("", "\n\n", "NCCL version 2.26.2+cuda12.8\n", "\0\0 Using network IB"):
        assert parse_nccl_log(text, 0) is None
    return {path.stem: seen(path.stem) for path in sorted(LOGS.glob("*.txt"))} | {"2.30": parse_nccl_log(cards, 3)}


def test_lines_that_are_cut_off_or_none_of_nccl_do_no_harm():
    text = (LOGS / "nvlink8.txt").read_text(encoding="utf-8")
    for end in range(0, len(text), 97):
        found = parse_nccl_log(text[:end] + "\nChannel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n", 3)
        assert found is None or found.network == "IB"


def test_a_log_is_written_into_a_folder_unless_the_user_looks_at_it(tmp_path):
    assert nccl_log_environment({"HOME": "/root", "NCCL_DEBUG": ""}, str(tmp_path / "100%")) == {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{tmp_path}/100%%/nccl.%h.%p.log",
    }  # fmt: skip
    for env in ({"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG_FILE": "/tmp/nccl.log"}):
        assert nccl_log_environment(env, "/tmp/x") == {}
    assert read_nccl_log(str(tmp_path), 3) is None
    (tmp_path / "nccl.dgx01.4300.log").write_bytes((LOGS / "no-p2p.txt").read_bytes() + b"\xff\xfe")
    assert read_nccl_log(str(tmp_path), 3) == seen("no-p2p")


# Processes beside a rank: who they are, whether they run, and how they ended.


SLEEPS = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", SLEEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


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


# Everybody meets everybody once, and nobody two at a time.


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 64])
def test_every_pair_meets_once_in_rounds_that_share_nobody(count):
    rounds = circle_rounds(range(count))
    assert len(rounds) == count - 1 + count % 2
    assert sorted(chain.from_iterable(rounds)) == list(combinations(range(count), 2))
    for pairs in rounds:
        assert len(pairs) == count // 2
        assert len(set(chain.from_iterable(pairs))) == 2 * len(pairs)


def test_ends_of_any_kind_meet_in_their_order():
    assert circle_rounds(()) == circle_rounds(("a",)) == ()
    assert set(chain.from_iterable(circle_rounds(("b", "a", "c")))) == {("b", "a"), ("b", "c"), ("a", "c")}


# What the rank that reports says of the processes beside it.


def watching(local_ranks, reported):
    """Rank 1 beside these processes; what it reports is added to ``reported``."""
    return Watcher(
        rank=1, members=(), tracker=Tracker(), conversation=None, hang_timeout_s=60.0, clean_up=lambda: None,
        finish=lambda stop: reported.append(stop) or 1, local_ranks=local_ranks,
    )  # fmt: skip


ALARM = Alarm(ending=Ending.FAILED, rank=1, phase="measure", signal=None)


def test_a_process_that_died_after_the_position_was_taken_is_seen(sleeper, local_ranks):
    local_ranks.add(0, home_of(sleeper))
    reported: list[Stop] = []
    watcher = watching(local_ranks, reported)
    position = watcher.position()
    sleeper.kill()
    assert wait_for(lambda: 0 in local_ranks.gone())
    assert watcher.stop_alone(ALARM, position) == 1
    assert position.states["0"] not in {"Z", ""}
    assert reported[0].positions[0].states == {"0": "Z"}
    assert reported[0].positions[0].ends == {"0": "SIGKILL"}


def test_a_lower_rank_that_exited_by_itself_has_reported_already(sleeper, local_ranks):
    local_ranks.add(0, home_of(sleeper))
    sleeper.stdin.close()
    assert wait_for(lambda: 0 in local_ranks.gone())
    reported: list[Stop] = []
    watcher = watching(local_ranks, reported)
    assert (watcher.stop_alone(ALARM, watcher.position()), reported) == (1, [])


# What a tracker says must let ranks be compared: the same count in the same group is the same call.


WORLD, PAIR = (0, 1, 2), (0, 1)


def call(tracker, op, group):
    tracker.enter(op, group)
    tracker.leave()


def test_a_tracker_counts_calls_by_group_and_says_what_is_going_on():
    before = time.monotonic()
    in_pair, alone = Tracker(), Tracker()
    for tracker, groups in ((in_pair, (WORLD, PAIR, PAIR, WORLD)), (alone, (WORLD, WORLD))):
        for group in groups:
            tracker.enter("barrier", group)
            assert (tracker.op, tracker.inside) == ("barrier", True)
            tracker.leave()
            assert not tracker.inside
    assert (in_pair.group, in_pair.calls) == (alone.group, alone.calls) == (WORLD, 2)
    assert alone.allowance_s == START_ALLOWANCE_S
    alone.at("measure", "all_reduce float32 1 GiB", allowance_s=7.0)
    assert (alone.phase, alone.what, alone.allowance_s) == ("measure", "all_reduce float32 1 GiB", 7.0)
    assert alone.moved_s >= before
    alone.at("end")
    assert (alone.what, alone.allowance_s) == ("", 0.0)


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
