from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import BenchSettings, Collective, Mode
from ddpdoctor.probes.bandwidth.budget import CAUTION, Forecast, Growth, share_out
from ddpdoctor.probes.bandwidth.cases import list_cases
from ddpdoctor.probes.bandwidth.sweep import list_steps
from ddpdoctor.probes.bandwidth.timing import LEAST_BATCHES, LEAST_CALLS, MOST_CALLS

KIB, MIB = 2**10, 2**20
LATENCY_ONLY = BenchSettings(modes=(Mode.LATENCY,), min_size_bytes=MIB, max_size_bytes=8 * MIB)


def steps_of(settings: BenchSettings):
    return list_steps(list_cases(settings, 2))


def known(steps, call_s: float, rest_s: float, iterations: int | None = None) -> Forecast:
    """A forecast after the first of the steps."""
    forecast = Forecast("gloo", iterations)
    for case in steps[0].cases:
        forecast.see_call(steps[0], case.mode, call_s)
    forecast.see_rest(steps[0], rest_s)
    return forecast


def test_nothing_is_predicted_before_anything_was_seen():
    growth = Growth(1, guess_gb_s=1.0)

    assert growth.predict(MIB) == 0.0


def test_while_times_do_not_grow_a_guess_of_the_bandwidth_holds():
    growth = Growth(1, guess_gb_s=1.0)
    growth.see(KIB, 0.001)
    growth.see(2 * KIB, 0.001)

    # In proportion it would be a thousand seconds.
    assert growth.predict(2**30) == pytest.approx(CAUTION * (0.001 + 2**30 / 1e9), rel=1e-3)


def test_once_times_grow_they_grow_in_proportion():
    growth = Growth(1, guess_gb_s=1000.0)
    growth.see(KIB, 0.001)
    growth.see(64 * MIB, 0.5)

    assert growth.predict(128 * MIB) == pytest.approx(CAUTION * 1.0)


def test_a_time_too_long_for_latency_grows_in_proportion_though_only_one_size_was_seen():
    growth = Growth(1, guess_gb_s=1.0)
    growth.see(64 * MIB, 5.0)

    assert growth.predict(128 * MIB) == pytest.approx(CAUTION * 10.0)


def test_the_first_step_is_measured_though_nothing_is_known_of_it():
    slot = share_out(steps_of(BenchSettings()), Forecast("gloo", None), 30.0)

    assert slot is not None
    assert slot.left_s is None
    assert slot.seconds == {mode: pytest.approx(30.0 / 42, rel=0.1) for mode in Mode}


def test_a_step_that_there_is_no_time_for_is_refused():
    first, second = steps_of(replace(LATENCY_ONLY, max_size_bytes=2 * MIB))
    forecast = known([first], call_s=1.0, rest_s=1.0)

    needed_s = CAUTION * 2 * (LEAST_CALLS * 1.0 + 1.0)

    assert share_out([second], forecast, needed_s - 0.01) is None
    slot = share_out([second], forecast, needed_s + 0.01)
    assert slot is not None
    assert slot.seconds[Mode.LATENCY] == pytest.approx(CAUTION * 2 * LEAST_CALLS, abs=0.02)


def test_smaller_sizes_come_first_where_there_is_not_time_for_all():
    steps = steps_of(LATENCY_ONLY)
    forecast = known(steps, call_s=0.1, rest_s=0.1)
    second_s, third_s = (CAUTION * size * 0.1 * (LEAST_CALLS + 1) for size in (2, 4))

    slot = share_out(steps[1:], forecast, second_s + third_s + 1.0)

    # The fourth does not fit, so the second left over is for the two that do.
    assert slot is not None
    assert slot.seconds[Mode.LATENCY] == pytest.approx(CAUTION * 2 * 0.1 * LEAST_CALLS + 0.5)


def test_with_time_enough_all_sizes_get_several_times_the_least_number_of_calls():
    steps = steps_of(LATENCY_ONLY)
    forecast = known(steps, call_s=0.1, rest_s=0.1)
    needed_s = sum(CAUTION * size * 0.1 * (4 * LEAST_CALLS + 1) for size in (2, 4, 8))

    slot = share_out(steps[1:], forecast, needed_s + 0.3)

    assert slot is not None
    assert slot.seconds[Mode.LATENCY] == pytest.approx(CAUTION * 2 * 0.1 * 4 * LEAST_CALLS + 0.1)


def test_what_is_left_is_no_more_than_what_so_many_calls_take():
    first, second = steps_of(replace(LATENCY_ONLY, max_size_bytes=2 * MIB))
    forecast = known([first], call_s=1e-4, rest_s=1e-3)

    slot = share_out([second], forecast, 1000.0)

    assert slot is not None
    assert slot.left_s is not None
    assert slot.left_s < 2 * CAUTION * (2 * 1e-4 * MOST_CALLS + 1e-2)


def test_a_number_of_calls_that_the_user_wants_is_what_counts():
    first, second = steps_of(replace(LATENCY_ONLY, max_size_bytes=2 * MIB))
    forecast = known([first], call_s=0.1, rest_s=1e-9, iterations=100)
    needed_s = CAUTION * 2 * 0.1 * 100

    assert share_out([second], forecast, needed_s - 0.1) is None
    assert share_out([second], forecast, needed_s + 0.1) is not None


def test_throughput_takes_a_few_batches():
    settings = replace(LATENCY_ONLY, modes=(Mode.THROUGHPUT,), max_size_bytes=2 * MIB)
    first, second = steps_of(settings)
    forecast = known([first], call_s=1.0, rest_s=1e-9)

    assert share_out([second], forecast, CAUTION * 2 * LEAST_BATCHES - 0.1) is None
    assert share_out([second], forecast, CAUTION * 2 * LEAST_BATCHES + 0.1) is not None


def test_a_dear_collective_leaves_the_others_their_sizes():
    settings = replace(LATENCY_ONLY, collectives=(Collective.ALL_REDUCE, Collective.BROADCAST), max_size_bytes=2 * MIB)
    dear, cheap, next_dear, next_cheap = steps_of(settings)
    forecast = Forecast("gloo", None)
    for step, seconds in ((dear, 10.0), (cheap, 0.01)):
        forecast.see_call(step, Mode.LATENCY, seconds)
        forecast.see_rest(step, seconds)

    assert share_out([next_dear, next_cheap], forecast, 20.0) is None
    assert share_out([next_cheap], forecast, 20.0) is not None
