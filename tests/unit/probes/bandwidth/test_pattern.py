import functools

import pytest
import torch

from ddpdoctor.model.bandwidth import Case, Collective, Mode
from ddpdoctor.probes.bandwidth.group import RankGroup
from ddpdoctor.probes.bandwidth.pattern import PERIODS, put_in, reduced, tolerance
from ddpdoctor.probes.bandwidth.tracker import Tracker

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
