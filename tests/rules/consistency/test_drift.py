"""Parameters that differ: who is to blame, since when, and the likely cause."""

from dataclasses import replace

import pytest

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from tests.rules.consistency.build import (
    PASSED,
    SETTINGS,
    against,
    apart,
    codes,
    difference,
    everywhere,
    judged,
    outcome,
    stream,
    verdict,
)

FASTER = (("lr", "0.5"), ("weight_decay", "0"))
DECAYED = (("lr", "0.1"), ("weight_decay", "0.01"))
OF_THREE = difference(What.PARAMETER, sides=against(0))


def test_the_odd_rank_the_first_tensor_and_the_steps_are_named():
    first = replace(OF_THREE, splits=difference(What.PARAMETER, names=("1.bias", "2.weight"), sides=against(0)).splits)
    found = verdict(stream(first, ranks=3), ranks=3)
    assert (found.code, found.kind, found.severity) == ("DD501", "param-drift", Severity.ERROR)
    assert (found.ranks, found.confidence) == ((0,), Confidence.HIGH)
    assert (found.step, found.tensor) == (50, "1.bias")
    assert "loaded only there or an in-place edit" in found.summary
    assert "equal at step 32, different after step 50: they diverged in between" in found.evidence
    assert any("1.bias, 2.weight" in sentence for sentence in found.evidence)
    assert found.where == ()
    assert found.fix


def test_of_two_it_cannot_be_determined_which():
    found = verdict(stream(difference(What.PARAMETER)))
    assert (found.ranks, found.confidence) == ((0, 1), Confidence.LOW)
    assert any("it is unknown which" in sentence for sentence in found.evidence)
    assert "on one rank" in found.summary


def test_whoever_is_outvoted_at_one_tensor_is_named():
    splits = (
        *difference(What.PARAMETER, sides=against(0)).splits,
        *difference(What.PARAMETER, sides=against(2)).splits,
    )
    found = verdict(stream(replace(OF_THREE, splits=splits, differing=2), ranks=3), ranks=3)
    assert (found.ranks, found.confidence) == ((0, 2), Confidence.HIGH)


def test_the_first_point_of_all_has_no_last_good_one():
    found = verdict(stream(difference(What.PARAMETER, 1, None)))
    assert found.step == 1
    assert "different after step 1, in the first comparison" in found.evidence


def test_parameters_that_never_were_equal():
    found = verdict(stream(difference(What.PARAMETER, 1, None, sides=apart(3)), ranks=3), ranks=3)
    assert "on several ranks" in found.summary
    assert "init_sync=False" in found.summary
    assert "init_sync" not in verdict(stream(OF_THREE, ranks=3), ranks=3).summary


def test_another_learning_rate_is_reported_with_its_values():
    first = difference(What.PARAMETER, 1, None, sides=against(2))
    now = everywhere(3, 1, odd={2: {"settings": FASTER}})
    found = verdict(stream(first, ranks=3, now=now), ranks=3)
    assert (found.code, found.ranks, found.confidence) == ("DD501", (2,), Confidence.HIGH)
    assert "lr is 0.1 on ranks 0 and 1, 0.5 on rank 2" in found.summary
    assert codes(stream(first, ranks=3, now=now), ranks=3) == ["DD501", "DD505"]


def test_of_two_learning_rates_it_cannot_be_determined_which():
    first = difference(What.PARAMETER, 1, None)
    found = verdict(stream(first, now=everywhere(2, 1, odd={1: {"settings": FASTER}})))
    assert (found.ranks, found.confidence) == ((0, 1), Confidence.LOW)
    assert "lr is 0.1 on rank 0, 0.5 on rank 1" in found.summary


def test_other_kernels_round_otherwise():
    now = everywhere(2, 50, odd={1: {"settings": (*SETTINGS, ("fused", "True"))}})
    found = verdict(stream(difference(What.PARAMETER), now=now))
    assert "fused is not set on rank 0, True on rank 1" in found.summary
    assert codes(stream(now=now)) == []


def test_settings_at_the_end_are_those_of_the_last_step():
    now = everywhere(2, 64, odd={1: {"settings": FASTER}})
    steps = stream(last_number=64, values=((64, now),))
    end = stream(difference(What.PARAMETER, 80, None), clock=StreamClock.END, now=everywhere(2, 80, settings=()))
    assert "lr is" in next(f for f in judged(steps, end)[0] if f.code == "DD501").summary


def test_state_that_was_loaded_on_one_rank():
    seen = (
        difference(What.PARAMETER, 4, 2, sides=against(1)),
        difference(What.STATE, 4, 2, sides=against(1), part="m"),
    )
    found = verdict(stream(*seen, ranks=3), ranks=3)
    assert (found.code, found.ranks) == ("DD501", (1,))
    assert "the optimizer state differs since step 4, with equal gradients" in found.summary
    assert codes(stream(*seen, ranks=3), ranks=3) == ["DD501", "DD505"]


LEFT_OUT = {"wrote": (), "state": (difference(What.STATE, 50, 32, sides=against(1), part="m"),)}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_gradients_of_steps_that_were_not_compared_may_be_the_cause(name):
    """They are gone by the time that parameters are looked at: after every step it would be reported."""
    seen = (difference(What.PARAMETER, 50, 32, sides=against(1)), *LEFT_OUT[name])
    for found in judged(stream(*seen, ranks=3), ranks=3)[0]:
        assert "or gradients were changed after the reduction in a step that was not compared" in found.summary
        assert "--check-every 1" in found.fix
    each = tuple(replace(one, number=33) for one in seen)
    for found in judged(stream(*each, ranks=3), ranks=3)[0]:
        assert "in between" not in found.summary
        assert "--check-every" not in found.fix


def test_state_that_weight_decay_moves_is_no_cause():
    seen = (difference(What.PARAMETER), difference(What.STATE, part="m"))
    decayed = stream(*seen, now=everywhere(2, 50, settings=DECAYED))
    assert "in-place edit" in verdict(decayed).summary
    assert codes(decayed) == ["DD501"]
    decoupled = stream(*seen, now=everywhere(2, 50, settings=DECAYED, optimizer="AdamW"))
    assert "state differs" in verdict(decoupled).summary


def test_lbfgs_looks_at_its_own_loss():
    found = verdict(stream(difference(What.PARAMETER), now=everywhere(2, 50, optimizer="LBFGS")))
    assert "LBFGS" in found.summary


def test_a_parameter_that_ddp_does_not_know():
    found = verdict(stream(difference(What.PARAMETER), now=everywhere(2, 50, unreduced=("0.weight",))))
    assert "added, replaced or unfrozen" in found.summary


def test_a_few_steps_without_a_reduction():
    """The end of an epoch in the midst of an accumulation: gradients are equal again at the step that is looked at."""
    found = verdict(stream(difference(What.PARAMETER), now=everywhere(2, 50, reductions=48)))
    assert (found.ranks, found.confidence) == ((0, 1), Confidence.HIGH)
    assert "2 of the last 18 steps had no gradient reduction" in found.summary


def test_state_of_a_step_without_a_reduction_was_loaded_nowhere():
    seen = (difference(What.PARAMETER), difference(What.STATE, part="m"))
    assert codes(stream(*seen, now=everywhere(2, 50, reductions=49))) == ["DD501"]


def test_two_steps_a_reduction_as_ever_are_no_cause():
    found = verdict(
        stream(
            difference(What.PARAMETER), now=everywhere(2, 50, reductions=25), before=everywhere(2, 32, reductions=16)
        )
    )
    assert "without a reduction" not in found.summary


UNEVEN = {
    "one of three steps": (3, {0: 0, 1: 0, 2: 80}, (2,), 1, Confidence.HIGH),
    "one of three does not": (3, {0: 80, 1: 0, 2: 80}, (1,), 1, Confidence.HIGH),
    "one of two": (2, {0: 80, 1: 0}, (0, 1), 1, Confidence.LOW),
    "one step more": (3, {0: 80, 1: 81, 2: 80}, (1,), 81, Confidence.HIGH),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_steps_on_some_ranks_only(name):
    ranks, steps, blamed, step, confidence = UNEVEN[name]
    now = everywhere(ranks, 80, odd={rank: {"steps": count} for rank, count in steps.items()})
    end = stream(difference(What.PARAMETER, 80, None, sides=apart(ranks)), clock=StreamClock.END, ranks=ranks, now=now)
    found = verdict(end, ranks=ranks)
    assert (found.code, found.ranks, found.step, found.confidence) == ("DD501", blamed, step, confidence)
    assert "different numbers of steps" in found.summary


def test_uneven_steps_are_seen_where_ranks_first_are_not_equally_far():
    """Equal numbers of steps are then another place of training on each rank: they are not compared."""
    parted = everywhere(3, 32, odd={1: {"reductions": 31}})
    steps = stream(
        difference(What.GRADIENT, 32, 16, sides=against(1)), difference(What.PARAMETER, 32, 16, sides=against(1)),
        ranks=3, now=parted, before=everywhere(3, 16),
    )  # fmt: skip
    now = everywhere(3, 80, odd={1: {"steps": 81}})
    end = stream(difference(What.PARAMETER, 80, None, sides=against(1)), clock=StreamClock.END, ranks=3, now=now)
    assert codes(steps, end, ranks=3) == ["DD501"]
    found = verdict(steps, end, ranks=3)
    assert (found.ranks, found.step) == ((1,), 32)
    assert any("equal at step 16" in sentence for sentence in found.evidence)


def test_uneven_steps_that_end_equal_are_no_alarm():
    parted = everywhere(2, 32, odd={1: {"reductions": 31}})
    steps = stream(difference(What.PARAMETER, 32, 16), now=parted, before=everywhere(2, 16))
    assert codes(steps, stream(clock=StreamClock.END)) == []
    assert outcome("DD501", steps, stream(clock=StreamClock.END)) == PASSED


def test_the_end_shows_what_came_after_the_last_point():
    end = stream(difference(What.PARAMETER, 80, None), clock=StreamClock.END)
    found = verdict(stream(last_number=64), end)
    assert (found.code, found.step) == ("DD501", 80)
    assert "equal at step 64, different at the end, after step 80: they diverged in between" in found.evidence


def test_what_a_rank_loads_after_the_last_step_is_no_alarm():
    end = stream(difference(What.PARAMETER, 64, None), clock=StreamClock.END)
    assert codes(stream(last_number=64), end) == []
    assert outcome("DD501", stream(last_number=64), end) == PASSED


def test_the_end_of_an_accumulation_is_numbered_by_its_steps():
    end = stream(difference(What.PARAMETER, 320, None), clock=StreamClock.END, now=everywhere(2, 320, steps=80))
    assert verdict(end).step == 80


def test_without_an_optimizer_steps_are_reductions():
    found = verdict(stream(difference(What.PARAMETER, 8, 4), clock=StreamClock.FORWARD, now=everywhere(2, 8, steps=0)))
    assert (found.code, found.step) == ("DD501", 8)


def test_the_earlier_clock_is_reported():
    steps = stream(difference(What.PARAMETER, 50, 32))
    end = stream(difference(What.PARAMETER, 80, None), clock=StreamClock.END)
    findings = judged(end, steps)[0]
    assert [(finding.code, finding.step) for finding in findings] == [("DD501", 50)]


SILENT = {
    "equal": (stream(), PASSED),
    "the end alone": (stream(clock=StreamClock.END), PASSED),
    "buffers alone": (stream(clock=StreamClock.SYNC), (Outcome.SKIPPED, "no parameters were compared")),
    "post-local SGD": (
        stream(difference(What.PARAMETER), now=everywhere(2, 50, optimizer="PostLocalSGDOptimizer")),
        (Outcome.SKIPPED, "local SGD: ranks differ by design until their parameters are averaged"),
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_no_alarm(name):
    seen, expected = SILENT[name]
    assert codes(seen) == []
    assert outcome("DD501", seen) == expected


def test_after_join_the_end_alone_counts():
    inside = stream(difference(What.PARAMETER, 4, 2), now=everywhere(2, 4, join=True))
    assert codes(inside, stream(clock=StreamClock.END)) == []
    assert codes(inside, stream(difference(What.PARAMETER, 90, None), clock=StreamClock.END)) == ["DD501"]


def test_a_group_of_the_same_name_and_other_ranks_is_another_model():
    here = stream(difference(What.PARAMETER, 50, 32))
    there = replace(stream(clock=StreamClock.END), ranks=(2, 3))
    assert codes(here, there, ranks=4) == ["DD501"]
    assert outcome("DD503", here, there, ranks=4) == PASSED


def test_evidence_that_was_not_kept_leaves_the_tensors_to_tell():
    found = verdict(stream(OF_THREE, ranks=3, values=()), ranks=3)
    assert (found.ranks, found.step) == ((0,), 50)
