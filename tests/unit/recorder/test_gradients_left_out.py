"""Under ``wrap --speed`` gradients are checked in the steps in which replicas are compared, else in all."""

from types import SimpleNamespace

from ddpdoctor.recorder.gradients import local


def checked(every: int) -> list[int]:
    """Return which of the first 150 steps are checked."""
    local._kept.every = every
    try:
        return [step for step in range(1, 151) if not local._is_left_out(SimpleNamespace(reductions=step - 1))]
    finally:
        local._kept.every = 0


def test_every_step_is_checked_without_the_option():
    assert checked(0) == list(range(1, 151))


def test_with_the_option_the_steps_of_comparisons_are():
    assert checked(50) == [1, 2, 4, 8, 16, 32, 50, 100, 150]
