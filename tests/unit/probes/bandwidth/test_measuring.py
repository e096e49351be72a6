"""What a sweep measures: buffers, patterns, memory, timing and the spread."""

import random
import re
import statistics
import weakref
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpdoctor.collect.limits import read_machine, read_memory_limit
from ddpdoctor.collect.system import System
from ddpdoctor.model.bandwidth import BenchSettings, Case, Collective, Mode
from ddpdoctor.probes.bandwidth import collectives
from ddpdoctor.probes.bandwidth.collectives import (
    COLD_FACTOR,
    PERIODS,
    RankGroup,
    Tracker,
    bus_factor,
    cache_bytes,
    count_sets,
    counts,
    put_in,
    set_bytes,
    tolerance,
    working_bytes,
)
from ddpdoctor.probes.bandwidth.plan import (
    CAUTION,
    DTYPES,
    LEAST_BATCHES,
    LEAST_CALLS,
    Forecast,
    Growth,
    list_cases,
    share_out,
)
from ddpdoctor.probes.bandwidth.session import (
    count_takers,
    find_lack,
    left_of,
    list_steps,
    needed_bytes,
    read_free_bytes,
)
from ddpdoctor.probes.bandwidth.timing import (
    BarrierWaits,
    Effort,
    coefficient_of_variation,
    even_out,
    lateness,
    median_interval,
    plan_calls,
    summarize,
)
from tests.golden import Cases, table, words
from tests.rules.bandwidth.build import members
from tests.unit.probes.bandwidth.rank_jobs import LATE_S, run_ranks

CASES = Cases(__name__)
test_kept = CASES.test()


def arrivals(hosts, *cases):
    """Return who comes late to barriers. Cases are taken together, and each counts with so many calls."""
    waits = BarrierWaits([*hosts])
    for case in cases:
        waits.add(case)
    return waits.summary()


test_rows = table("arrivals", "ddpdoctor.probes.bandwidth.timing", globals())


KIB, MIB, GIB = 2**10, 2**20, 2**30
LATENCY_ONLY = BenchSettings(modes=(Mode.LATENCY,), min_size_bytes=MIB, max_size_bytes=8 * MIB)


def steps_of(settings):
    return list_steps(list_cases(settings, 2))


def known(steps, call_s, rest_s, iterations=None):
    """A forecast after the first of the steps."""
    forecast = Forecast("gloo", iterations)
    for case in steps[0].cases:
        forecast.see(steps[0], case.mode, call_s)
    forecast.see(steps[0], None, rest_s)
    return forecast


def predicted(row):
    """Times are guessed until they grow, and then grow in proportion; each with caution."""
    guess_gb_s, seen, size = row
    growth = Growth(1, guess_gb_s=guess_gb_s)
    for one, seconds in seen.items():
        growth.see(one, seconds)
    return growth.predict(size) / CAUTION


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
        mixed.see(step, Mode.LATENCY, seconds)
        mixed.see(step, None, seconds)
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


def last_cache(files):
    with TemporaryDirectory() as folder:
        write(Path(folder), {f"{name}/size": f"{text}\n" for name, text in files.items()})
        return cache_bytes(CPU, Path(folder))


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


@pytest.mark.full
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
            collectives.write_pattern(buffer, put_in(case, group, 0), 0)
        collectives._compare_output(buffer, collectives._expected(group, case), tolerance(case, group))
    assert 0 < allocated.peak <= working_bytes(case, group) == 64 * PERIODS["cpu"]


RANKS = 3
CALLS = 6


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_ranks("measure", RANKS, tmp_path_factory.mktemp("measure"))


@pytest.mark.full
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
        assert ranks[1]["share"] > 0.5
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


def free_bytes(row):
    """A row has the control groups of this process, and files of the groups."""
    groups, cgroups = row
    with TemporaryDirectory() as folder:
        system = System(root=Path(folder))
        write(system.path("/proc"), {**MEMINFO, "self/cgroup": groups})
        write(system.path("/sys/fs/cgroup"), cgroups)
        return left_of(read_machine(system), read_memory_limit(system))


def test_this_machine_has_free_memory():
    assert 0 < read_free_bytes(CPU) < 2**50


def test_what_does_not_fit_is_refused_in_words_and_ranks_share_the_memory_of_their_gpu_or_of_their_host():
    """A fifth is left to others."""
    said = {6: "", 7: "needs 7 GiB of 8 GiB free on rank 3", 24: "needs 24 GiB of 8 GiB free on rank 3"}
    assert {size: find_lack(size * GIB, 8 * GIB, 3) for size in said} == said
    for device, gpu_ranks, takers in (("cuda", 1, 1), ("cuda", 2, 2), ("cpu", 1, 3)):
        everybody = members(6, hosts=2, device=device, gpu_ranks=gpu_ranks)
        assert count_takers(everybody[0], everybody) == takers


def times_of_its_size(row):
    """Return what a case needs beside what its check works with: its buffers, and what the backend copies."""
    collective, in_place, backend = row
    group = RankGroup(None, (0, 1, 2, 3), CPU, backend, Tracker())
    case = case_of(Collective(collective), 64 * MIB, in_place=in_place)
    return (needed_bytes(case, group) - working_bytes(case, group)) / (64 * MIB)


CASE = Case(
    collective=Collective.ALL_REDUCE, dtype="float32", redop="sum", mode=Mode.LATENCY, in_place=True, size_bytes=10**6,
    count=250_000,
)  # fmt: skip


def plan_of(row):
    """A row has the mode, the seconds or the number of calls that were asked for, and what a call takes."""
    mode, asked, each_s = row
    effort = Effort(iterations=asked) if isinstance(asked, int) else Effort(seconds=asked)
    return plan_calls(Mode(mode), effort, each_s)


test_words = words(
    __name__,
    plan_calls=plan_of, lateness=lambda waits: lateness([[wait] for wait in waits]).tolist()[0],
    median_interval=lambda count: median_interval(random.Random(1).sample(range(int(count)), int(count))),
    coefficient_of_variation=coefficient_of_variation,
    predicted=predicted, cache_bytes=last_cache, free_bytes=free_bytes, times_of_its_size=times_of_its_size,
)  # fmt: skip


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


def test_the_interval_holds_the_median_in_about_95_of_100_samples():
    source = random.Random(7)
    # Times have a long tail: the median of this is 1.
    samples = [[source.lognormvariate(0, 1) for _ in range(50)] for _ in range(1000)]
    held = statistics.fmean(low <= 1 <= high for low, high in map(median_interval, samples))
    assert 0.93 < held < 0.985


def as_swept(log):
    """Return what a log has, save for times."""
    rows = [
        f"{one['collective']} {one['mode']} {one['size_bytes']} B, in place: {one['in_place']}, wrong: {one['wrong']}, "
        f"calls: {one['iterations']}, busbw: {one['busbw_gb_s'] is not None}"
        for one in log["results"]
    ]
    reported = [what for what, share, left_s in log["reported"] if 0 <= share <= 1 and (left_s is None or left_s >= 0)]
    assert len(reported) == len(log["reported"])
    return {
        "results": rows, "wrong": log["wrong"], "notes": log["notes"],
        "left out": [
            (one["collective"], one["sizes_bytes"], re.sub(r"of .* free on rank .", "of what is", one["reason"]))
            for one in log["left_out"]
        ],
        "arrivals": [(one["rank"], one["host"], one["calls"]) for one in log["arrivals"]],
        "reported": [*reported[:1], *reported[-1:]], "ended": (log["inside"], log["phase"]),
    }  # fmt: skip


@CASES
def sweeps(tmp_path):
    """All ranks have the same in their logs. An element that was altered at one size is found there alone."""
    found = {}
    for ranks in (2, 1):
        (tmp_path / str(ranks)).mkdir()
        first, *others = run_ranks("sweep", ranks, tmp_path / str(ranks))
        for name, log in first.items():
            assert all({**one[name], "reported": None} == {**log, "reported": None} for one in others), name
            if name == "short":  # how far it comes goes by the machine
                (left_out,) = log["left_out"]
                measured = [one["size_bytes"] for one in log["results"]]
                assert measured + left_out["sizes_bytes"] == [KIB * 4**power for power in range(12)]
                assert measured
                assert left_out["reason"] == "the budget of 0.5 s is too short"
            else:
                found[f"{ranks} ranks, {name}"] = as_swept(log)
    return found


def test_what_a_call_raises_is_not_swallowed_on_the_rank_nor_on_the_others(tmp_path):
    other, culprit = run_ranks("raise", 2, tmp_path)
    assert culprit == "no route to host"
    assert other != "nothing was raised"
