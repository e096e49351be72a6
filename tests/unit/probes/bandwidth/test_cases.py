"""What a bench runs, with which contents, and that the result is right."""

import functools
from dataclasses import replace

import pytest
import torch

from ddpdoctor.model.bandwidth import BenchSettings, Case, Collective, Mode
from ddpdoctor.probes.bandwidth.collectives import bus_factor
from ddpdoctor.probes.bandwidth.correctness import PERIODS, put_in, reduced, tolerance
from ddpdoctor.probes.bandwidth.group import RankGroup, Tracker
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
from tests.unit.probes.bandwidth.ranks import run_ranks

KIB, MIB, GIB = 2**10, 2**20, 2**30
ONE_MODE = BenchSettings(modes=(Mode.LATENCY,))


@pytest.mark.parametrize(
    ("smallest", "largest", "factor", "sizes"),
    [
        (KIB, 8 * KIB, 2, [KIB, 2 * KIB, 4 * KIB, 8 * KIB]),
        (KIB, 8 * KIB, 3, [KIB, 3 * KIB, 8 * KIB]),
        (KIB, KIB, 2, [KIB]),
        (1, 5, 2, [1, 2, 4, 5]),
        (KIB, KIB + 1, 1024, [KIB, KIB + 1]),
    ],
)
def test_sizes_grow_by_the_factor_and_the_largest_is_always_there(smallest, largest, factor, sizes):
    assert list(list_sizes(smallest, largest, factor)) == sizes


def test_the_default_has_21_sizes_from_1_kib_to_1_gib_in_both_modes():
    cases = list_cases(BenchSettings(), 2)

    assert [case.size_bytes for case in cases[::2]] == [KIB << power for power in range(21)]
    assert [case.mode for case in cases[:2]] == [Mode.LATENCY, Mode.THROUGHPUT]


@pytest.mark.parametrize(
    ("collective", "size", "element", "ranks", "rounded"),
    [
        # One buffer: whole elements.
        (Collective.ALL_REDUCE, 1000, 4, 3, 1000),
        (Collective.ALL_REDUCE, 1001, 4, 3, 1000),
        (Collective.BROADCAST, 7, 8, 3, 8),
        (Collective.REDUCE, 1, 4, 3, 4),
        (Collective.SEND_RECV, 1003, 2, 3, 1002),
        # Shared out: what each rank gets is a multiple of 16 bytes.
        (Collective.ALL_GATHER, 1024, 4, 2, 1024),
        (Collective.ALL_GATHER, 1024, 4, 3, 336 * 3),
        (Collective.REDUCE_SCATTER, MIB, 2, 3, 349520 * 3),
        (Collective.ALL_TO_ALL, MIB, 1, 7, 149792 * 7),
        # Never nothing, however many ranks there are.
        (Collective.ALL_GATHER, 1024, 8, 1000, 16000),
        (Collective.ALL_TO_ALL, 1, 1, 1, 16),
    ],
)
def test_a_size_is_rounded_to_what_can_be_shared_out(collective, size, element, ranks, rounded):
    assert round_size(collective, size, element, ranks) == rounded


def test_a_case_says_the_size_really_used_and_counts_elements_as_nccl_tests_does():
    settings = replace(ONE_MODE, collectives=(Collective.ALL_GATHER,), min_size_bytes=1000, max_size_bytes=1000)

    (case,) = list_cases(replace(settings, dtypes=("bfloat16",)), 3)

    assert (case.size_bytes, case.count, case.redop) == (960, 480, None)


def test_sizes_that_come_out_alike_are_measured_once():
    settings = replace(ONE_MODE, collectives=(Collective.ALL_GATHER,), min_size_bytes=1, max_size_bytes=64)

    assert [case.size_bytes for case in list_cases(settings, 2)] == [32, 64]


def test_small_sizes_of_all_collectives_come_before_large_ones():
    settings = replace(
        ONE_MODE,
        collectives=(Collective.ALL_REDUCE, Collective.BROADCAST),
        dtypes=("float32", "int8"),
        min_size_bytes=KIB,
        max_size_bytes=2 * KIB,
    )

    assert [(case.collective.value, case.dtype, case.size_bytes) for case in list_cases(settings, 2)] == [
        ("all_reduce", "float32", KIB),
        ("all_reduce", "int8", KIB),
        ("broadcast", "float32", KIB),
        ("broadcast", "int8", KIB),
        ("all_reduce", "float32", 2 * KIB),
        ("all_reduce", "int8", 2 * KIB),
        ("broadcast", "float32", 2 * KIB),
        ("broadcast", "int8", 2 * KIB),
    ]


@pytest.mark.parametrize("collective", list(Collective))
def test_only_what_reduces_has_an_operator(collective):
    (case,) = list_cases(
        replace(ONE_MODE, collectives=(collective,), redop="max", min_size_bytes=KIB, max_size_bytes=KIB), 2
    )

    assert case.redop == ("max" if collective.value in {"all_reduce", "reduce_scatter", "reduce"} else None)


def test_one_rank_has_nobody_to_send_to_and_that_is_said():
    settings = replace(
        ONE_MODE,
        collectives=(Collective.ALL_REDUCE, Collective.SEND_RECV),
        min_size_bytes=KIB,
        max_size_bytes=4 * KIB,
        factor=4,
    )

    assert {case.collective for case in list_cases(settings, 1)} == {Collective.ALL_REDUCE}
    (left_out,) = list_impossible(settings, 1)
    assert (left_out.collective, left_out.mode, left_out.sizes_bytes) == (Collective.SEND_RECV, None, (KIB, 4 * KIB))
    assert "two ranks" in left_out.reason
    assert list_impossible(settings, 2) == ()


@pytest.mark.parametrize(
    ("collective", "asked", "in_place"),
    [
        # torch.distributed has one buffer for these.
        (Collective.ALL_REDUCE, False, True),
        (Collective.BROADCAST, False, True),
        (Collective.REDUCE, False, True),
        # These have two.
        (Collective.ALL_GATHER, False, False),
        (Collective.ALL_GATHER, True, True),
        (Collective.REDUCE_SCATTER, False, False),
        (Collective.REDUCE_SCATTER, True, True),
        (Collective.ALL_TO_ALL, True, False),
        (Collective.SEND_RECV, True, False),
    ],
)
def test_in_place_is_what_really_shares_memory(collective, asked, in_place):
    assert is_in_place(collective, asked=asked) is in_place


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        (Collective.ALL_REDUCE, 2, 1.0),
        (Collective.ALL_REDUCE, 8, 1.75),
        (Collective.ALL_REDUCE, 1, None),
        (Collective.ALL_GATHER, 4, 0.75),
        (Collective.REDUCE_SCATTER, 4, 0.75),
        (Collective.ALL_TO_ALL, 4, 0.75),
        (Collective.ALL_GATHER, 1, None),
        (Collective.BROADCAST, 4, 1.0),
        (Collective.REDUCE, 4, 1.0),
        (Collective.SEND_RECV, 4, 1.0),
        (Collective.BROADCAST, 1, None),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective, ranks, factor):
    assert bus_factor(collective, ranks) == factor


@pytest.mark.parametrize(
    ("backend", "dtype", "redop", "torch", "can"),
    [
        *[("gloo", dtype, redop, "2.6.0", True) for dtype in DTYPES for redop in ("sum", "prod", "min", "max")],
        *[("nccl", dtype, "avg", "2.13.0", dtype.startswith(("float", "bfloat"))) for dtype in DTYPES],
        ("gloo", "float32", "avg", "2.13.0+cpu", True),
        ("gloo", "float32", "avg", "2.8.0", True),
        ("gloo", "float32", "avg", "2.7.1", False),
        ("nccl", "float32", "avg", "2.6.0", True),
        ("gloo", "int32", "avg", "2.13.0", False),
        ("gloo", "float32", "xor", "2.13.0", False),
        ("gloo", "float8_e4m3fn", "sum", "2.13.0", False),
        ("gloo", "int16", "sum", "2.13.0", False),
        ("mpi", "float32", "sum", "2.13.0", False),
    ],
)
def test_what_a_backend_can_reduce(backend, dtype, redop, torch, can):
    assert reducible(backend, dtype, redop, torch) is can


@pytest.mark.parametrize(
    ("backend", "torch", "says"),
    [
        ("gloo", "2.13.0", "and float64, float32, float16 and bfloat16 by avg."),
        ("gloo", "2.6.0", "by avg from torch 2.8 on."),
        ("nccl", "2.6.0", "and float64, float32, float16 and bfloat16 by avg."),
        ("mpi", "2.13.0", "Backends are gloo and nccl."),
    ],
)
def test_a_message_says_what_is_possible(backend, torch, says):
    assert possible(backend, torch).endswith(says)


SIZES = [1, 2, 3, 5, 8, 16, 17, 100, 1000]
COUNT = 4096


def group_of(size: int) -> RankGroup:
    return RankGroup(None, tuple(range(size)), torch.device("cpu"), "gloo", Tracker())


def case_of(redop: str | None, dtype: str = "float64", count: int = COUNT) -> Case:
    return Case(
        collective=Collective.ALL_REDUCE if redop else Collective.ALL_GATHER,
        dtype=dtype,
        redop=redop,
        mode=Mode.LATENCY,
        in_place=True,
        size_bytes=count * torch.empty(0, dtype=getattr(torch, dtype)).element_size(),
        count=count,
    )


def values(pattern, start: int = 0, stop: int = COUNT) -> torch.Tensor:
    return torch.cat(list(pattern.pieces(start, stop)))


COMBINE = {
    "sum": torch.Tensor.add,
    "avg": torch.Tensor.add,
    "prod": torch.Tensor.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("redop", list(COMBINE))
def test_what_comes_out_is_what_the_ranks_put_in(redop, size):
    case, group = case_of(redop), group_of(size)
    inputs = [values(put_in(case, group, rank)) for rank in range(size)]

    result = functools.reduce(COMBINE[redop], inputs)

    expected = values(reduced(case, group))
    assert torch.equal(result / size if redop == "avg" else result, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("redop", list(COMBINE))
def test_every_partial_result_is_a_whole_number_that_int8_and_bfloat16_hold(redop, size):
    case, group = case_of(redop), group_of(size)
    inputs = [values(put_in(case, group, rank)) for rank in range(size)]

    # Nothing is negative: no partial result is larger than the whole.
    whole = functools.reduce(COMBINE[redop], inputs)

    assert all(bool((one >= 0).all()) and torch.equal(one, one.round()) for one in inputs)
    assert float(whole.max()) <= 127
    assert torch.equal(whole.to(torch.bfloat16).to(torch.float64), whole)


@pytest.mark.parametrize("size", [2, 3, 17, 100])
@pytest.mark.parametrize("redop", list(COMBINE))
def test_a_result_without_one_of_the_ranks_is_another(redop, size):
    case, group = case_of(redop), group_of(size)
    inputs = [values(put_in(case, group, rank)) for rank in range(size)]
    whole = functools.reduce(COMBINE[redop], inputs)

    for missing in range(size):
        others = inputs[:missing] + inputs[missing + 1 :]
        assert not torch.equal(functools.reduce(COMBINE[redop], others), whole)


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


@pytest.mark.parametrize(
    ("redop", "dtype", "size", "allowed"),
    [
        ("sum", "bfloat16", 3, 0.0),
        ("avg", "float32", 2, 0.0),
        ("avg", "bfloat16", 8, 0.0),
        ("avg", "float32", 3, 2 * 2**-23),
        ("avg", "bfloat16", 3, 2 * 2**-7),
    ],
)
def test_only_an_average_over_a_number_that_is_no_power_of_two_may_be_rounded(redop, dtype, size, allowed):
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


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    return run_ranks("check", RANKS, tmp_path_factory.mktemp("check"))


def test_all_that_gloo_can_do_is_checked_and_right(checked):
    reduced = 4 * sum(reducible("gloo", dtype, redop) for dtype in DTYPES for redop in REDOPS)
    carried = 5 * len(DTYPES)
    large = 7 * 2

    assert checked[0]["everything"] == [reduced + carried + large, []]


def test_every_rank_knows_what_is_wrong_on_any(checked):
    assert checked[0]["seeded"] == checked[1]["seeded"] == checked[2]["seeded"]


@pytest.mark.parametrize(
    ("fault", "rank", "index", "off", "count"),
    [
        ("one element", 1, 777, 1.0, 1),
        ("bfloat16", 1, 777, 1.0, 1),
        ("max", 1, 777, 1.0, 1),
        ("min", 1, 777, 1.0, 1),
        ("prod", 1, 777, 1.0, 1),
        ("avg", 1, 777, 1.0, 1),
        ("large", 1, 777, 1.0, 1),
        ("broadcast", 2, 5, 1.0, 1),
    ],
)
def test_one_element_altered_on_one_rank_is_named(checked, fault, rank, index, off, count):
    if fault == "avg" and not reducible("gloo", "float32", "avg"):
        pytest.skip("Gloo of this torch has no average")
    (wrong,) = checked[0]["seeded"][fault]

    assert (wrong["rank"], wrong["host"], wrong["index"], wrong["count"]) == (rank, f"host{rank}", index, count)
    assert wrong["found"] - wrong["expected"] == pytest.approx(off)


def test_what_is_no_number_is_wrong_and_counted(checked):
    (wrong,) = checked[0]["seeded"]["not a number"]

    assert (wrong["rank"], wrong["index"], wrong["found"], wrong["count"]) == (0, 1021, "nan", 3)


@pytest.mark.parametrize(("fault", "ranks"), [("not reduced", [0, 1, 2]), ("stale output", [0, 1, 2])])
def test_a_call_that_moves_no_data_is_wrong_on_every_rank(checked, fault, ranks):
    wrong = checked[0]["seeded"][fault]

    assert [one["rank"] for one in wrong] == ranks
    assert all(one["count"] > 1000 for one in wrong)


def test_the_slots_of_other_ranks_are_distinguished(checked):
    (wrong,) = checked[0]["seeded"]["slots of others"]

    assert (wrong["rank"], wrong["index"]) == (0, 0)
    assert wrong["count"] > 1000


@pytest.mark.parametrize("fault", ["another size", "reduce elsewhere"])
def test_what_is_not_altered_or_not_said_to_hold_is_not_wrong(checked, fault):
    # A buffer too small to be altered; what a reduction leaves on ranks that it does not go to.
    assert checked[0]["seeded"][fault] == []


def test_one_rank_alone_is_checked_too(tmp_path):
    (alone,) = run_ranks("check", 1, tmp_path)

    assert alone["everything"][1] == []
