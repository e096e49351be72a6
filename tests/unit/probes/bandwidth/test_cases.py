from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import BenchSettings, Collective, Mode
from ddpdoctor.probes.bandwidth.cases import (
    DTYPES,
    is_in_place,
    list_cases,
    list_impossible,
    list_sizes,
    possible,
    reducible,
    round_size,
)
from ddpdoctor.probes.bandwidth.collectives import bus_factor

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
