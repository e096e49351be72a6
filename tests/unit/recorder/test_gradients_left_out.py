"""Under ``wrap --speed`` gradients are checked in the steps in which replicas are compared, else in all."""

from types import SimpleNamespace

import pytest

from ddpdoctor.recorder.gradients import local
from ddpdoctor.recorder.replicas import schedule


@pytest.mark.parametrize(
    ("is_speed", "steps"), [(False, list(range(1, 151))), (True, [1, 2, 4, 8, 16, 32, 50, 100, 150])]
)
def test_with_the_option_the_steps_of_comparisons_are(is_speed, steps, monkeypatch):
    monkeypatch.setenv("DDPDOCTOR_CHECK_EVERY", "50")
    monkeypatch.setattr(local._kept, "is_speed", is_speed)
    monkeypatch.setattr(schedule._Chosen, "every", 0)
    left_out = {step: local._is_left_out(SimpleNamespace(reductions=step - 1)) for step in range(1, 151)}
    assert [step for step, out in left_out.items() if not out] == steps
