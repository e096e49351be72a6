"""Models that no DDP holds: equal gradients, or a loss of their own, tell which are to be equal."""

import pytest

from ddpdoctor.model.consistency import What
from ddpdoctor.model.findings import Confidence, Severity

from .build import SETTINGS, codes, difference, everywhere, outcome, stream, verdict

FROM_THE_START = difference(What.PARAMETER, 0, None, names=("critic.0.weight",))
LATER = difference(What.PARAMETER, 8, 4, names=("critic.0.weight",))
SINCE_THE_FIRST_STEP = difference(What.PARAMETER, 1, 0, names=("critic.0.weight",))
GRADIENTS = difference(What.GRADIENT, 1, None, names=("critic.0.weight",))
THROUGH = {"own_steps": 5, "through": 6}


def unwrapped(*differences, last=16, now=None, **more):
    """A stream of a model that no DDP holds, with what ranks wrote at its last point."""
    points = {one.number: everywhere(2, one.number) for one in differences}
    points[last] = everywhere(2, last, **(now or {}))
    return stream(*differences, model=-1, last_number=last, values=tuple(sorted(points.items())), **more)


def test_weights_that_nobody_sent():
    found = verdict(unwrapped(FROM_THE_START))
    assert (found.code, found.severity, found.confidence) == ("DD501", Severity.ERROR, Confidence.HIGH)
    assert (found.ranks, found.step, found.tensor) == ((0, 1), 1, "critic.0.weight")
    assert "before the first step" in found.summary
    assert "each rank created its own initial weights" in found.summary
    assert "broadcast" in found.fix


def test_a_drift_of_gradients_averaged_by_hand_has_the_causes_of_any_drift():
    odd = {1: {"settings": (("lr", "0.05"), SETTINGS[1])}}
    seen = stream(LATER, model=-1, last_number=16, now=everywhere(2, 8, odd=odd), before=everywhere(2, 4))
    assert "lr is" in verdict(seen).summary
    assert "equal at step 4" in " ".join(verdict(seen).evidence)


def test_a_discriminator_that_nobody_wrapped():
    found = verdict(unwrapped(GRADIENTS, SINCE_THE_FIRST_STEP, now=THROUGH))
    assert (found.code, found.severity, found.confidence) == ("DD501", Severity.ERROR, Confidence.LOW)
    assert "this model is not wrapped in DDP, and its gradients are not reduced" in found.summary
    assert "since their first gradients" in found.summary
    assert "from the start" in verdict(unwrapped(GRADIENTS, FROM_THE_START, now=THROUGH)).summary


HEALTHY = {
    "equal": (),
    "each rank its own": (GRADIENTS, FROM_THE_START),
    "each rank its own, from the same seed": (GRADIENTS, SINCE_THE_FIRST_STEP),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_models_that_may_be_each_rank_s_own(name):
    assert codes(unwrapped(*HEALTHY[name])) == []


@pytest.mark.parametrize("now", [{"through": 6}, {"own_steps": 5}])
def test_a_head_of_a_rank_s_own_behind_ddp(now):
    assert codes(unwrapped(GRADIENTS, FROM_THE_START, now=now)) == []


def test_too_little_to_tell():
    assert codes(unwrapped(FROM_THE_START, compared=2)) == []
    assert codes(unwrapped(FROM_THE_START, compared=8, unchanged=7)) == []
    assert codes(unwrapped(FROM_THE_START, kinds=(What.PARAMETER,))) == []


def test_other_rules_leave_it_alone():
    seen = unwrapped(GRADIENTS, FROM_THE_START, now=THROUGH, same_random=8)
    assert codes(seen) == ["DD501"]
    assert outcome("DD503", seen)[0] is outcome("DD502", seen)[0]
