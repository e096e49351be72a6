"""What a sweep measures: buffers, patterns, memory, timing and the spread."""

import random
import re
import statistics
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpdoctor.collect.limits import read_machine, read_memory_limit
from ddpdoctor.model.bandwidth import BenchSettings, Case, Collective, Mode
from ddpdoctor.probes.bandwidth import correctness
from ddpdoctor.probes.bandwidth.collectives import (
    COLD_FACTOR,
    bus_factor,
    cache_bytes,
    count_sets,
    counts,
    read_cache_bytes,
    set_bytes,
)
from ddpdoctor.probes.bandwidth.correctness import PERIODS, put_in, tolerance, working_bytes
from ddpdoctor.probes.bandwidth.group import RankGroup, Tracker
from ddpdoctor.probes.bandwidth.plan import CAUTION, DTYPES, Forecast, Growth, list_cases, share_out
from ddpdoctor.probes.bandwidth.session import (
    FreeMemory,
    count_takers,
    left_of,
    list_steps,
    needed_bytes,
    read_free_bytes,
)
from ddpdoctor.probes.bandwidth.timing import (
    LEAST_BATCHES,
    LEAST_CALLS,
    MOST_BATCH_CALLS,
    MOST_BATCHES,
    MOST_CALLS,
    MOST_KEPT,
    BarrierWaits,
    Effort,
    TimingPlan,
    coefficient_of_variation,
    even_out,
    lateness,
    median_interval,
    plan_calls,
    quantile,
    summarize,
)
from tests.golden import Cases
from tests.rules.bandwidth.build import members
from tests.unit.probes.bandwidth.rank_jobs import LATE_S, run_ranks

CASES = Cases(__name__)
test_kept = CASES.test()


@pytest.mark.parametrize(
    ("waits", "late"),
    [
        # Two ranks: what the other waited longer.
        ([20.0, 0.0], [-20.0, 20.0]),
        # The late rank waits for nobody, and only it is late.
        ([20.0, 0.0, 20.0, 20.0], [0.0, 20.0, 0.0, 0.0]),
        # With an odd number of others the middle one, with an even number the mean of the middle two.
        ([1.0, 2.0, 4.0, 9.0], [3.0, 2.0, -2.0, -7.0]),
        ([1.0, 2.0, 5.0], [2.5, 1.0, -3.5]),
        # Equal waits: nobody is late.
        ([7.0, 7.0, 7.0], [0.0, 0.0, 0.0]),
    ],
)
def test_lateness_is_the_median_wait_of_the_others_less_the_own(waits, late):
    assert lateness([[wait] for wait in waits]).tolist() == [late]


@CASES
def arrivals_at_barriers():
    """Cases are taken together, and each counts with so many calls."""
    waits = {
        "one is late": ("aab", [[20000.0, 21000.0, 19000.0], [10.0, 5.0, 20.0], [20010.0, 20990.0, 19010.0]]),
        "one is late once": (
            "aaa", [[30.0, 10.0, 10.0, 10.0, 10.0], [0.0, 10.0, 11.0, 9.0, 10.0], [30.0, 10.0, 10.0, 10.0, 10.0]]
        ),
        "many calls and one": ("aa", [[5.0] * (MOST_KEPT + 50), [0.0] * (MOST_KEPT + 50)], [[5.0], [0.0]]),
        "one rank": ("a", [[1.0, 2.0]]), "nothing": ("ab",),
    }  # fmt: skip
    found = {}
    for name, (hosts, *cases) in waits.items():
        arrivals = BarrierWaits([*hosts])
        for case in cases:
            arrivals.add(case)
        found[name] = arrivals.summary()
    return found


KIB, MIB, GIB = 2**10, 2**20, 2**30
LATENCY_ONLY = BenchSettings(modes=(Mode.LATENCY,), min_size_bytes=MIB, max_size_bytes=8 * MIB)


def steps_of(settings):
    return list_steps(list_cases(settings, 2))


def known(steps, call_s, rest_s, iterations=None):
    """A forecast after the first of the steps."""
    forecast = Forecast("gloo", iterations)
    for case in steps[0].cases:
        forecast.see_call(steps[0], case.mode, call_s)
    forecast.see_rest(steps[0], rest_s)
    return forecast


@pytest.mark.parametrize(
    ("guess_gb_s", "seen", "size", "predicted"),
    [
        (1.0, {}, MIB, 0.0),
        (1.0, {KIB: 0.001, 2 * KIB: 0.001}, 2**30, CAUTION * (0.001 + 2**30 / 1e9)),  # in proportion 1,000 s
        (1000.0, {KIB: 0.001, 64 * MIB: 0.5}, 128 * MIB, CAUTION * 1.0),
        (1.0, {64 * MIB: 5.0}, 128 * MIB, CAUTION * 10.0),  # too long for latency, though only one size was seen
    ],
)
def test_times_are_guessed_until_they_grow_and_then_grow_in_proportion(guess_gb_s, seen, size, predicted):
    growth = Growth(1, guess_gb_s=guess_gb_s)
    for one, seconds in seen.items():
        growth.see(one, seconds)
    assert growth.predict(size) == pytest.approx(predicted, rel=1e-3)


TWO_STEPS, FOUR_STEPS = steps_of(replace(LATENCY_ONLY, max_size_bytes=2 * MIB)), steps_of(LATENCY_ONLY)
LEAST_S = CAUTION * 2 * (LEAST_CALLS * 1.0 + 1.0)
"""What the second of two steps needs after a first with calls of 1 s and 1 s of other work."""
IN_ALL_S = sum(CAUTION * size * 0.1 * (4 * LEAST_CALLS + 1) for size in (2, 4, 8))
SECOND_AND_THIRD_S = sum(CAUTION * size * 0.1 * (LEAST_CALLS + 1) for size in (2, 4))


@CASES
def time_for_the_next_step():
    """None where there is no time for it; "left" is what all others take."""
    tenths = known(FOUR_STEPS, call_s=0.1, rest_s=0.1)
    both = replace(LATENCY_ONLY, collectives=(Collective.ALL_REDUCE, Collective.BROADCAST), max_size_bytes=2 * MIB)
    dear, cheap, next_dear, next_cheap = steps_of(both)
    mixed = Forecast("gloo", None)
    for step, seconds in ((dear, 10.0), (cheap, 0.01)):
        mixed.see_call(step, Mode.LATENCY, seconds)
        mixed.see_rest(step, seconds)
    found = {
        "nothing is known": share_out(steps_of(BenchSettings()), Forecast("gloo", None), 30.0),
        "not enough, enough": [
            share_out(TWO_STEPS[1:], known(TWO_STEPS[:1], 1.0, 1.0), LEAST_S + more) for more in (-0.01, 0.01)
        ],
        "not for all, so smaller sizes come first": share_out(FOUR_STEPS[1:], tenths, SECOND_AND_THIRD_S + 1.0),
        "for several times the least number of calls": share_out(FOUR_STEPS[1:], tenths, IN_ALL_S + 0.3),
        "no more than so many calls take": share_out(TWO_STEPS[1:], known(TWO_STEPS[:1], 1e-4, 1e-3), 1000.0),
        "a dear one, and a cheap one beside it": [
            share_out([next_dear, next_cheap], mixed, 20.0), share_out([next_cheap], mixed, 20.0)
        ],
    }  # fmt: skip
    for mode, call_s, iterations, calls in ((Mode.LATENCY, 0.1, 100, 100), (Mode.THROUGHPUT, 1.0, None, LEAST_BATCHES)):
        first, second = steps_of(replace(LATENCY_ONLY, modes=(mode,), max_size_bytes=2 * MIB))
        forecast, needed_s = known([first], call_s, 1e-9, iterations), CAUTION * 2 * call_s * calls
        slots = [share_out([second], forecast, needed_s + more) for more in (-0.1, 0.1)]
        found[f"{mode.value}, iterations: {iterations}"] = slots
    return found


CPU = torch.device("cpu")


def case_of(collective, size_bytes, *, in_place=False):
    return Case(
        collective=collective, dtype="float32", redop=None, mode=Mode.LATENCY, in_place=in_place,
        size_bytes=size_bytes, count=size_bytes // 4,
    )  # fmt: skip


def test_the_size_is_that_of_nccl_tests():
    """S is all_gather's output, reduce_scatter's input, all of a rank's data of all_to_all."""
    sides = dict.fromkeys(Collective, (4096, 4096))
    sides |= {Collective.ALL_GATHER: (1024, 4096), Collective.REDUCE_SCATTER: (4096, 1024)}
    assert {one: counts(case_of(one, 4 * 4096), 4) for one in sides} == sides


@pytest.mark.parametrize("size_bytes", [64 * KIB, MIB, 16 * MIB])
def test_cold_buffers_exceed_the_cache_and_warm_ones_are_one_set(size_bytes):
    case = case_of(Collective.ALL_REDUCE, size_bytes, in_place=True)
    assert count_sets(CPU, case, 2, most=10**6) * set_bytes(case, 2) > COLD_FACTOR * cache_bytes(CPU)
    small = case_of(Collective.ALL_REDUCE, 16, in_place=True)
    assert [count_sets(CPU, small, 2, most=most) for most in (400, 1)] == [400, 1]  # none is used twice


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({"index0": "32K", "index2": "1024K", "index3": "32768K"}, 32 * MIB),
        ({"index0": "48K", "index3": "1M"}, MIB),
        ({}, 64 * MIB),
        ({"index0": "unknown"}, 64 * MIB),
    ],
)
def test_the_last_cache_is_the_largest(tmp_path, files, size):
    for name, text in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(f"{text}\n")
    assert read_cache_bytes(tmp_path) == size


# What the check of the data allocates beside the buffers: the same for any number of ranks.


class FirstRank(RankGroup):
    """A group of which no other rank is there."""

    @property
    def index(self):
        return 0


class Allocated(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, while they live."""

    def __init__(self, buffer):
        super().__init__()
        self._known = {buffer.untyped_storage()._cdata}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._see(one.untyped_storage())
        return made

    def _see(self, storage):
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key, size):
        self._known.discard(key)
        self._now -= size


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(
    ("collective", "dtype", "redop"),
    [
        ("all_gather", "float32", None), ("all_to_all", "float64", None), ("reduce_scatter", "bfloat16", "sum"),
        ("all_reduce", "float64", "avg"), ("all_reduce", "int64", "max"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "periods"), [(3, 4), (64, 64), (64, 2), (512, 2)])
def test_it_does_not_grow_with_the_ranks(ranks, periods, collective, dtype, redop, wrong):
    count = periods * PERIODS["cpu"] // ranks * ranks
    case = Case(
        collective=Collective(collective), dtype=dtype, redop=redop, mode=Mode.LATENCY, in_place=False,
        size_bytes=count * DTYPES[dtype], count=count,
    )  # fmt: skip
    group = FirstRank(None, tuple(range(ranks)), CPU, "gloo", Tracker())
    buffer = torch.full((count,), float("nan") if wrong and "float" in dtype else 120, dtype=getattr(torch, dtype))
    with Allocated(buffer) as allocated:
        if not wrong:
            correctness._write(buffer, put_in(case, group, 0), 0)
        correctness._compare(buffer, correctness._expected(group, case), tolerance(case, group))
    assert 0 < allocated.peak <= working_bytes(case, group) == 64 * PERIODS["cpu"]


RANKS = 3
CALLS = 6


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_ranks("measure", RANKS, tmp_path_factory.mktemp("measure"))


def test_every_collective_is_measured_in_both_modes_warm_and_cold(measured):
    rows = [one for one, _, _ in measured[0]["measured"]]
    seen = {(row["collective"], row["mode"], row["warm"]) for row in rows}
    assert seen == {
        (one.value, mode, warm) for one in Collective for mode in ("latency", "throughput") for warm in (True, False)
    }
    assert all(row["iterations"] == CALLS and row["wrong"] is None for row in rows)


def test_times_and_bandwidths_fit_together_and_are_the_same_on_all_ranks(measured):
    """The first rank decides how many calls are made: others would wait for each other for ever."""
    for name in ("measured", "agreed"):
        assert measured[0][name] == measured[1][name] == measured[2][name]
    for row, waits, note in measured[0]["measured"]:
        assert 0 < row["min_us"] <= row["p50_low_us"] <= row["p50_us"] <= row["p50_high_us"]
        assert row["p50_us"] <= row["p95_us"]
        assert row["first_us"] > 0
        assert row["algbw_gb_s"] == pytest.approx(row["size_bytes"] / row["p50_us"] / 1e3)
        factor = bus_factor(Collective(row["collective"]), RANKS)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor)
        assert waits == ([CALLS] * RANKS if row["mode"] == "latency" else [])
        assert not note


def test_a_rank_that_comes_late_is_reported_before_the_barrier_and_after_it(measured):
    nobody, *late = (measured[0]["late"][where] for where in ("nobody", "barrier", "all_reduce"))
    for ranks in late:
        assert ranks[1]["late_us"] > 0.8 * LATE_S * 1e6
        assert ranks[1]["share"] > 0.8
    in_time = [*nobody, *(one for ranks in late for one in (ranks[0], ranks[2]))]
    assert all(one["late_us"] < 0.5 * LATE_S * 1e6 for one in in_time)


def test_in_place_the_output_is_the_input_or_the_own_part_of_it_and_else_they_share_nothing(measured):
    """4080 bytes are shared out over three ranks."""
    offsets = {"all_reduce": 0, "broadcast": 0, "reduce": 0, "all_gather": 1360, "reduce_scatter": -1360}
    for collective, offset in offsets.items():
        by_rank = [one["memory"][f"{collective} True"] for one in measured]
        assert by_rank == [[True, True, offset * rank] for rank in range(RANKS)], collective
    for collective in ("all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        assert all(one["memory"][f"{collective} False"] == [False, False, None] for one in measured)


def test_one_rank_alone_is_measured_and_has_no_bus_bandwidth(tmp_path):
    (alone,) = run_ranks("measure", 1, tmp_path)
    rows = [row for row, _, _ in alone["measured"]]
    assert {row["collective"] for row in rows} == {one.value for one in Collective} - {"send_recv"}
    assert all(row["busbw_gb_s"] is None and row["algbw_gb_s"] > 0 for row in rows)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


MEMINFO = {"meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"}


@pytest.mark.parametrize(
    ("groups", "cgroups", "free"),
    [
        ("", {}, 8 * GIB),
        # Version 2, the group's own limit; what is cached and not in use makes way.
        (
            "0::/job\n",
            {
                "job/memory.max": str(4 * GIB), "job/memory.current": str(3 * GIB),
                "job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        # A limit of a group above holds too.
        ("0::/slice/job\n", {"slice/memory.max": str(GIB), "slice/job/memory.max": "max\n"}, GIB),
        # In a container with its own view the path is "/".
        ("0::/\n", {"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
        # A limit above what the machine has left.
        ("0::/\n", {"memory.max": str(64 * GIB)}, 8 * GIB),
        # Version 1, beside other controllers; "no limit" is a large number.
        (
            "4:memory:/job\n3:cpuset:/other\n",
            {"memory/job/memory.limit_in_bytes": str(2 * GIB), "memory/job/memory.usage_in_bytes": str(GIB)},
            GIB,
        ),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, 8 * GIB),
        # A path out of the view of a container is not followed.
        ("0::/../../job\n", {"job/memory.max": "1"}, 8 * GIB),
    ],
)  # fmt: skip
def test_free_memory_is_what_the_machine_and_the_control_groups_leave(tmp_path, groups, cgroups, free):
    proc = write(tmp_path / "proc", {**MEMINFO, "self/cgroup": groups})
    group = read_memory_limit(proc, write(tmp_path / "cgroup", cgroups))
    assert left_of(read_machine(proc), group) == free
    assert 0 < read_free_bytes(CPU) < 2**50


def test_what_does_not_fit_is_refused_in_words_and_ranks_share_the_memory_of_their_gpu_or_of_their_host():
    """A fifth is left to others."""
    free = FreeMemory(free_bytes=8 * GIB, rank=3)
    said = {6: "", 7: "needs 7 GiB of 8 GiB free on rank 3", 24: "needs 24 GiB of 8 GiB free on rank 3"}
    assert {size: free.refuse(size * GIB) for size in said} == said
    for device, gpu_ranks, takers in (("cuda", 1, 1), ("cuda", 2, 2), ("cpu", 1, 3)):
        everybody = members(6, hosts=2, device=device, gpu_ranks=gpu_ranks)
        assert count_takers(everybody[0], everybody) == takers


@pytest.mark.parametrize(
    ("collective", "in_place", "backend", "times"),
    [
        (Collective.ALL_REDUCE, True, "gloo", 1.0),
        (Collective.ALL_TO_ALL, False, "gloo", 2.0),
        (Collective.SEND_RECV, False, "nccl", 2.0),
        # Input and output, and Gloo's copy.
        (Collective.ALL_GATHER, False, "gloo", 2.25),
        (Collective.ALL_GATHER, True, "gloo", 2.0),
        (Collective.ALL_GATHER, False, "nccl", 1.25),
        (Collective.REDUCE_SCATTER, False, "gloo", 2.25),
        (Collective.REDUCE_SCATTER, True, "nccl", 1.0),
    ],
)
def test_a_case_needs_its_buffers_and_what_the_backend_copies(collective, in_place, backend, times):
    group = RankGroup(None, (0, 1, 2, 3), CPU, backend, Tracker())
    case = Case(
        collective=collective, dtype="float32", redop=None, mode=Mode.LATENCY, in_place=in_place, size_bytes=64 * MIB,
        count=16 * MIB,
    )  # fmt: skip
    assert needed_bytes(case, group) == times * 64 * MIB + working_bytes(case, group)


CASE = Case(
    collective=Collective.ALL_REDUCE, dtype="float32", redop="sum", mode=Mode.LATENCY, in_place=True, size_bytes=10**6,
    count=250_000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "effort", "each_s", "plan"),
    [
        # As many as there is time for, within bounds.
        (Mode.LATENCY, Effort(seconds=0.5), 0.005, TimingPlan(batches=100, calls=1)),
        (Mode.LATENCY, Effort(seconds=0.5), 10.0, TimingPlan(batches=LEAST_CALLS, calls=1)),
        (Mode.LATENCY, Effort(seconds=0.5), 1e-6, TimingPlan(batches=MOST_CALLS, calls=1)),
        (Mode.LATENCY, Effort(seconds=0.5), 0.0, TimingPlan(batches=MOST_CALLS, calls=1)),
        (Mode.LATENCY, Effort(iterations=7), 10.0, TimingPlan(batches=7, calls=1)),
        # A batch lasts 5 ms at least; with more time, batches are longer rather than more.
        (Mode.THROUGHPUT, Effort(seconds=0.1), 0.001, TimingPlan(batches=20, calls=5)),
        (Mode.THROUGHPUT, Effort(seconds=0.3), 0.001, TimingPlan(batches=30, calls=10)),
        (Mode.THROUGHPUT, Effort(seconds=0.5), 10.0, TimingPlan(batches=LEAST_BATCHES, calls=1)),
        (Mode.THROUGHPUT, Effort(seconds=0.5), 1e-6, TimingPlan(batches=MOST_BATCHES, calls=MOST_BATCH_CALLS)),
        # What the user asks for is rounded up to whole batches.
        (Mode.THROUGHPUT, Effort(iterations=1), 0.001, TimingPlan(batches=1, calls=1)),
        (Mode.THROUGHPUT, Effort(iterations=20), 0.001, TimingPlan(batches=20, calls=1)),
        (Mode.THROUGHPUT, Effort(iterations=100), 0.001, TimingPlan(batches=25, calls=4)),
        (Mode.THROUGHPUT, Effort(iterations=31), 0.001, TimingPlan(batches=16, calls=2)),
    ],
)
def test_time_decides_how_many_calls_are_made_unless_the_user_does(mode, effort, each_s, plan):
    assert plan_calls(mode, effort, each_s) == plan


@CASES
def times_are_reduced_over_ranks_first():
    """In the first the median of each rank is 100; in every iteration one of them takes 300."""
    in_batches = replace(CASE, mode=Mode.THROUGHPUT)
    return {
        "one takes longer": summarize(
            CASE, [1000.0, 2000.0], [[100.0, 100.0, 300.0, 100.0], [300.0, 300.0, 100.0, 100.0]], 1, 2, warm=True
        ),
        "four ranks": summarize(CASE, [1.0] * 4, [[500.0]] * 4, 1, 4, warm=True),
        "batches of ten": summarize(in_batches, [1.0] * 2, [[1e3, 3e3, 2e3], [900.0] * 3], 10, 2, warm=False),
        "one rank": summarize(CASE, [1.0], [[100.0]], 1, 1, warm=True),
    }


def test_who_ends_a_call_early_does_not_make_the_others_late():
    # Rank 0's calls take 100 ms, rank 1's 20: it then waits for rank 0, which did nothing but end later.
    calls_us = [[100e3, 100e3, 100e3], [20e3, 20e3, 20e3]]
    assert even_out([[5.0, 0.0, 0.0], [5.0, 80e3, 80e3]], calls_us) == ((5.0, 100e3, 100e3), (5.0, 100e3, 100e3))
    # Here rank 0 dawdles for 20 ms besides.
    assert even_out([[5.0, 0.0], [5.0, 100e3]], calls_us) == ((5.0, 100e3), (5.0, 120e3))


def test_quantiles_are_interpolated_and_the_median_lies_between_two_order_statistics():
    """The 40th and the 61st of a hundred: the table of Conover and of others."""
    for values, share, expected in (([5.0], 0.95, 5.0), ([1.0, 2.0], 0.5, 1.5), ([3.0, 1.0, 2.0], 0.5, 2.0),
                                    (range(101), 0.95, 95.0), ([0.0, 10.0], 0.95, 9.5)):  # fmt: skip
        assert quantile(list(values), share) == pytest.approx(expected)
    ends = {1: (0, 0), 3: (0, 2), 5: (0, 4), 9: (0, 8), 100: (39, 60), 400: (179, 220)}
    assert {count: median_interval(random.Random(1).sample(range(count), count)) for count in ends} == ends
    for values, cv in (([2.0, 2.0], 0.0), ([1.0, 3.0], 0.5), ([4.0], 0.0), ([0.0, 0.0], 0.0)):
        assert coefficient_of_variation(values) == pytest.approx(cv)


def test_the_interval_holds_the_median_in_about_95_of_100_samples():
    source = random.Random(7)
    # Times have a long tail: the median of this is 1.
    samples = [[source.lognormvariate(0, 1) for _ in range(50)] for _ in range(1000)]
    held = statistics.fmean(low <= 1 <= high for low, high in map(median_interval, samples))
    assert 0.93 < held < 0.985


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return run_ranks("sweep", 2, tmp_path_factory.mktemp("sweep"))


def test_every_case_is_checked_and_measured_from_small_to_large(swept):
    few = swept[0]["few"]
    sizes = [row["size_bytes"] for row in few["results"]]
    assert sizes == sorted(sizes)
    assert {(row["collective"], row["mode"], row["size_bytes"]) for row in few["results"]} == {
        (one.value, mode, size) for one in Collective for mode in ("latency", "throughput") for size in (KIB, 4 * KIB)
    }
    assert all(row["wrong"] == 0 and row["iterations"] == 3 for row in few["results"])
    assert few["left_out"] == few["wrong"] == few["notes"] == []


def test_all_ranks_have_the_same_in_their_logs(swept):
    for name, first in swept[0].items():
        second = swept[1][name]
        assert {**first, "reported": None} == {**second, "reported": None}, name


def test_what_there_is_no_time_or_memory_for_is_left_out_and_said(swept):
    short, huge = swept[0]["short"], swept[0]["huge"]
    (left_out,), (too_large,) = short["left_out"], huge["left_out"]
    measured = [row["size_bytes"] for row in short["results"]]
    assert measured + left_out["sizes_bytes"] == [KIB * 4**power for power in range(12)]
    assert measured
    assert left_out["reason"] == "the budget of 0.5 s is too short"
    assert ([row["size_bytes"] for row in huge["results"]], too_large["sizes_bytes"]) == ([KIB], [2**45])
    assert re.fullmatch(r"needs 32768 GiB of .* free on rank [01]", too_large["reason"])


def test_one_element_altered_at_one_size_is_found_there_and_nowhere_else(swept):
    altered = swept[0]["altered"]
    (wrong,) = altered["wrong"]
    assert (wrong["rank"], wrong["size_bytes"], wrong["index"], wrong["count"]) == (1, 2 * KIB, 100, 1)
    assert wrong["found"] == wrong["expected"] - 1
    assert [(row["size_bytes"], row["wrong"]) for row in altered["results"]] == [
        (size, int(size == 2 * KIB)) for size in (KIB, KIB, 2 * KIB, 2 * KIB, 4 * KIB, 4 * KIB)
    ]


def test_in_place_is_where_there_is_such_a_form_and_elsewhere_it_is_said(swept):
    in_place = swept[0]["in place"]
    assert {row["collective"]: row["in_place"] for row in in_place["results"]} == {
        one.value: one not in {Collective.ALL_TO_ALL, Collective.SEND_RECV} for one in Collective
    }
    assert in_place["notes"] == ["all_to_all and send_recv: measured out of place, there is no form in place"]


def test_progress_says_what_is_measured_how_far_it_is_and_what_is_left(swept):
    few = swept[0]["few"]
    reported = few["reported"]
    assert reported[0][0] == "all_reduce float32 1 KiB"
    assert reported[0][2] is None
    assert reported[-1][0] == "send_recv float32 4 KiB"
    assert all(0 <= share <= 1 and (left_s is None or left_s >= 0) for _, share, left_s in reported)
    assert [(one["rank"], one["host"], one["calls"]) for one in few["arrivals"]] == [
        (rank, f"host{rank}", 3 * 7 * 2) for rank in range(2)
    ]
    assert all(rank["few"]["inside"] is False and rank["few"]["phase"] == "measure" for rank in swept)


def test_one_rank_alone_is_swept_and_what_takes_two_is_said(tmp_path):
    (alone,) = run_ranks("sweep", 1, tmp_path)
    few = alone["few"]
    (left_out,) = few["left_out"]
    assert left_out["collective"] == "send_recv"
    assert len(few["results"]) == 6 * 2 * 2
    assert all(row["busbw_gb_s"] is None for row in few["results"])
    assert few["arrivals"] == []


def test_what_a_call_raises_is_not_swallowed_on_the_rank_nor_on_the_others(tmp_path):
    other, culprit = run_ranks("raise", 2, tmp_path)
    assert culprit == "no route to host"
    assert other != "nothing was raised"
