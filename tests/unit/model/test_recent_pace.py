"""A rank's pace over its last steps, and spans of time in words."""

import pytest

from ddpdoctor.model.amounts import format_span
from ddpdoctor.model.steps import RECENT_STEPS, StepEnd, StepTimes, recent_pace

MS = 1_000_000


def times(ends_ms, numbers=None, phases_us=(10_000, 0, 0, 0), waits_us=(2_500, 0, 0, 0)):
    count = len(ends_ms)
    return StepTimes(
        ends_with=StepEnd.REDUCTION, group="", numbers=numbers or tuple(range(1, count + 1)),
        phases_us=[(one,) * count for one in phases_us], waits_us=[(one,) * count for one in waits_us],
        ended_ns=tuple(end * MS for end in ends_ms),
    )  # fmt: skip


def test_a_step_takes_the_time_between_two_ends():
    pace = recent_pace(times([10, 30, 50]))
    assert (pace.number, pace.ended_ns, pace.step_ms, pace.waits_share) == (3, 50 * MS, 20.0, 0.25)


def test_steps_that_the_record_lacks_count_too():
    assert recent_pace(times([40, 80, 200], (4, 8, 20))).step_ms == 10.0


def test_only_the_last_steps_count():
    slow = [1000 * step for step in range(1, 31)]
    quick = [30_000 + 10 * step for step in range(1, RECENT_STEPS + 1)]
    assert recent_pace(times(slow + quick)).step_ms == pytest.approx(10.0)


def test_a_single_step_takes_what_its_phases_took():
    assert recent_pace(times([10])).step_ms == 10.0


def test_without_a_step_or_its_time_there_is_no_pace():
    assert recent_pace(times([])) is None
    kept = times([10])
    assert (
        recent_pace(StepTimes(**{name: getattr(kept, name) for name in StepTimes.__slots__} | {"ended_ns": ()})) is None
    )


@pytest.mark.parametrize(
    ("span_s", "words"),
    [
        (0, "0.0 s"), (3.21, "3.2 s"), (9.96, "10 s"), (99, "99 s"), (100, "1 min 40 s"), (125, "2 min 5 s"),
        (2460, "41 min"), (3600, "1 h"), (11_520, "3 h 12 min"), (129_600, "36 h"), (187_200, "2 days 4 h"),
    ],
)  # fmt: skip
def test_a_span_in_words(span_s, words):
    assert format_span(span_s) == words
