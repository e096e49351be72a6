"""What ranks of a device mesh hold alike: differences are reported by its dimension, and DDP is not brought in."""

from dataclasses import replace

import pytest

from ddpdoctor.model.consistency import Difference, StreamClock, TensorRow, TensorSplit, What
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

MESH = {"group": "mesh tp", "optimizer": 1}


def test_parameters_are_reported_by_the_dimension() -> None:
    found = verdict(stream(difference(What.PARAMETER, sides=against(1)), ranks=3, **MESH), ranks=3)
    assert (found.code, found.ranks, found.tensor) == ("DD501", (1,), "0.weight")
    assert "ranks 0-2 should have equal values along the tp dimension of the mesh" in found.evidence
    assert "DDP" not in found.summary + (found.fix or "")


def test_gradients_are_no_matter_of_ddp() -> None:
    found = verdict(stream(difference(What.GRADIENT, sides=against(2)), ranks=3, **MESH), ranks=3)
    assert (found.code, found.ranks) == ("DD503", (2,))
    assert (
        "ranks along the tp dimension of the mesh have equal copies of these parameters, but rank 2 changed them"
        in found.summary
    )
    assert "DDP" not in found.summary + (found.fix or "")


def test_another_learning_rate_is_the_cause_here_too() -> None:
    now = everywhere(3, odd={2: {"settings": (("lr", "0.2"),)}})
    found = verdict(stream(difference(What.PARAMETER, sides=against(2)), ranks=3, now=now, **MESH), ranks=3)
    assert "the optimizer has different settings" in found.summary


def test_groups_of_one_dimension_are_compared_each_by_itself() -> None:
    equal = stream(ranks=2, **MESH)
    other = stream(difference(What.PARAMETER, sides=((2,), (3,))), ranks=4, **MESH)
    other = replace(other, ranks=(2, 3))
    found = verdict(equal, other, ranks=4)
    assert "between ranks 2 and 3" in found.summary
    assert "ranks 2 and 3 should have equal values along the tp dimension of the mesh" in found.evidence


def test_equal_replicas_in_a_mesh_are_no_finding() -> None:
    assert not judged(stream(ranks=3, **MESH), ranks=3)[0]


FREQ = "layers.12.rope.inv_freq"
EMPTY = {"unwritten": ("layers.*.rope.inv_freq",)}


def constants(*tensors, ranks=3, odd=None):
    """The one comparison of constants: the name of each that differs, its sides, its dtype and shape."""
    splits = tuple(
        TensorSplit(
            row=TensorRow(what=What.BUFFER, name=name, part=f"{dtype}{list(shape)}", shape=shape, dtype=dtype),
            sides=sides,
        )
        for name, sides, dtype, shape in tensors
    )
    found = Difference(what=What.BUFFER, number=2, last_equal=None, splits=splits, differing=len(splits), of=9)
    now = everywhere(ranks, 2, odd=odd, optimizer="", settings=())
    more = {"group": "mesh dp", "model": 2, "optimizer": 1, "kinds": (What.BUFFER,), "compared": 1}
    return stream(found, ranks=ranks, now=now, **more)


def buffer(sides, name=FREQ, dtype="float32", shape=(32,)):
    return name, sides, dtype, shape


@pytest.mark.parametrize(
    ("ranks", "sides", "odd", "blamed", "confidence", "words"),
    [
        (2, apart(2), {1: EMPTY}, (1,), Confidence.HIGH, f"nothing was seen to write to {FREQ} on rank 1"),
        (2, apart(2), {0: EMPTY, 1: EMPTY}, (0, 1), Confidence.LOW, f"nothing was seen to write to {FREQ} on ranks 0"),
        (4, against(0, 4), dict.fromkeys((1, 2, 3), EMPTY), (1, 2, 3), Confidence.HIGH, f"{FREQ} on ranks 1-3"),
        (3, against(2), None, (2,), Confidence.HIGH, f"no wrapper of the model makes {FREQ} equal"),
        (3, against(0), None, (0, 1, 2), Confidence.LOW, f"no wrapper of the model makes {FREQ} equal"),
    ],
    ids=["one left empty", "all left empty", "only rank 0 was loaded", "one computed otherwise", "rank 0 alone"],
)
def test_constants_that_nothing_makes_equal(ranks, sides, odd, blamed, confidence, words) -> None:
    seen = constants(buffer(sides), ranks=ranks, odd=odd)
    found = verdict(seen, ranks=ranks)
    assert (found.code, found.severity, found.tensor) == ("DD502", Severity.WARNING, FREQ)
    assert (found.ranks, found.confidence) == (blamed, confidence)
    assert words in found.summary
    assert "1 of 9 constant tensors differ: float32[32] of " + FREQ in found.evidence
    assert "DDP" not in found.summary + (found.fix or "")
    assert "after to_empty(), give every buffer its value on all ranks" in (found.fix or "")


@pytest.mark.parametrize(
    ("tensor", "odd"),
    [
        (buffer(apart(3)), None),
        (buffer(((0, 1), (2, 3))), None),
        (buffer(against(2), "seed"), None),
        (buffer(against(2), "moe.expert_bias"), None),
        (buffer(against(2), "is_last", "bool", ()), None),
        (buffer(against(2), "attention.kv_cache"), {2: {"unwritten": ("attention.kv_cache",)}}),
        (buffer(apart(3)), {2: {"unwritten": ("layers.*.mask",)}}),
    ],
    ids=["no majority", "halves", "seed", "expert", "flag", "scratch memory", "another one left empty"],
)
def test_constants_that_ranks_may_have_for_themselves(tensor, odd) -> None:
    ranks = sum(map(len, tensor[1]))
    seen = constants(tensor, ranks=ranks, odd=odd)
    assert not judged(seen, ranks=ranks)[0]
    assert outcome("DD502", seen, ranks=ranks) == (
        Outcome.SKIPPED,
        "constant tensors differ between ranks of a mesh, but each rank may have its own by design",
    )


def test_only_constants_that_should_be_equal_are_named() -> None:
    found = verdict(constants(buffer(apart(3), "noise"), buffer(against(1)), buffer(against(1), "seed")), ranks=3)
    assert (found.tensor, found.ranks) == (FREQ, (1,))
    assert "noise" not in found.summary + " ".join(found.evidence)


# Models that no DDP holds: equal gradients, or a loss of their own, tell which are to be equal.


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


# Buffers, optimizers, stale optimizers and random states.


SLOWER = (("lr", "0.05"), ("weight_decay", "0"))
MEAN = difference(What.BUFFER, 1, None, names=("1.running_mean", "1.running_var"))


def test_buffers_that_nobody_sends_are_a_warning():
    found = verdict(stream(MEAN, kinds=(*SILENT_KINDS, What.BUFFER)))
    assert (found.code, found.kind, found.severity) == ("DD502", "buffer-drift", Severity.WARNING)
    assert (found.ranks, found.step, found.tensor) == ((0, 1), 1, "1.running_mean")
    assert "with broadcast_buffers=False, each rank keeps the statistics of its own data" in found.summary
    assert "SyncBatchNorm" in found.fix
    assert "--allow-different" in found.fix


SILENT_KINDS = (What.PARAMETER, What.GRADIENT)


def test_buffers_that_ddp_has_not_sent_are_those_of_the_next_step():
    first = difference(What.BUFFER, 8, 4, names=("mask",), sides=against(1))
    found = verdict(stream(first, clock=StreamClock.SYNC, ranks=3), ranks=3)
    assert (found.code, found.ranks, found.step, found.tensor) == ("DD502", (1,), 9, "mask")
    assert "replaced or registered after wrapping" in found.summary


def test_buffers_do_not_hide_an_error():
    seen = stream(MEAN, difference(What.PARAMETER, 50, 32), kinds=(*SILENT_KINDS, What.BUFFER))
    assert verdict(seen).code == "DD501"
    assert codes(seen) == ["DD501", "DD502"]


def test_equal_buffers_have_passed_and_without_any_nothing_has():
    assert outcome("DD502", stream(clock=StreamClock.SYNC)) == PASSED
    assert outcome("DD502", stream()) == (Outcome.SKIPPED, "no buffers that DDP sends were compared")


def test_settings_that_differ_while_parameters_are_equal():
    now = everywhere(3, 100, odd={2: {"settings": SLOWER}})
    seen = stream(ranks=3, values=((1, everywhere(3, 1)), (100, now)))
    found = verdict(seen, ranks=3)
    assert (found.code, found.kind, found.ranks, found.step) == ("DD505", "optimizer-drift", (2,), 100)
    assert "lr is 0.1 on ranks 0 and 1, 0.05 on rank 2" in found.summary
    assert "equal at step 1" in found.evidence


def test_settings_of_two_ranks():
    found = verdict(stream(now=everywhere(2, 100, odd={1: {"settings": SLOWER}})))
    assert (found.code, found.ranks, found.confidence) == ("DD505", (0, 1), Confidence.LOW)


def test_settings_of_one_group():
    odd = {0: {"settings": (*SETTINGS, ("1.lr", "0.2"))}}
    now = everywhere(3, 100, odd=odd, settings=(*SETTINGS, ("1.lr", "0.1")))
    found = verdict(stream(ranks=3, now=now), ranks=3)
    assert (found.ranks, "1.lr is 0.1 on ranks 1 and 2, 0.2 on rank 0" in found.summary) == ((0,), True)


NO_SETTINGS = {
    "not known on one rank": everywhere(2, 100, odd={1: {"settings": ()}}),
    "another kernel": everywhere(2, 100, odd={1: {"settings": (*SETTINGS, ("1.foreach", "True"))}}),
    "not equally far": everywhere(2, 100, odd={1: {"settings": SLOWER, "reductions": 99}}),
    "inside join": everywhere(2, 100, odd={1: {"settings": SLOWER}}, join=True),
    "post-local SGD": everywhere(2, 100, odd={1: {"settings": SLOWER}}, hook="post_localSGD_hook"),
}


@pytest.mark.parametrize("name", NO_SETTINGS)
def test_settings_that_are_no_alarm(name):
    assert codes(stream(now=NO_SETTINGS[name])) == []


def test_an_optimizer_without_state_has_passed_by_its_settings():
    seen = stream(kinds=(What.PARAMETER, What.GRADIENT))
    assert outcome("DD505", seen) == PASSED
    unknown = replace(seen, values=((100, everywhere(2, 100, settings=())),))
    assert outcome("DD505", unknown) == (Outcome.SKIPPED, "no optimizers were compared")


def test_state_that_differs_first_is_the_verdict():
    state = difference(What.STATE, 4, 2, part="exp_avg", sides=against(1))
    seen = stream(state, difference(What.PARAMETER, 8, 4, sides=against(1)), ranks=3)
    found = verdict(seen, ranks=3)
    assert (found.code, found.ranks, found.step, found.tensor) == ("DD505", (1,), 4, "0.weight")
    assert "parameters will diverge too" in found.summary
    assert any("exp_avg of 0.weight" in sentence for sentence in found.evidence)
    assert codes(seen, ranks=3) == ["DD501", "DD505"]


def test_sharded_state_is_meant_so():
    seen = stream(
        difference(What.STATE, part="m"), now=everywhere(2, 50, optimizer="ZeroRedundancyOptimizer", settings=())
    )
    assert codes(seen) == []
    result, reason = outcome("DD505", replace(seen, values=seen.values[1:]))
    assert (result, "ZeroRedundancyOptimizer" in reason) == (Outcome.SKIPPED, True)


def test_state_inside_join_is_not_compared():
    seen = stream(difference(What.STATE, part="m"), now=everywhere(2, 50, join=True))
    assert codes(seen) == []


STALE = {"stray": 4, "unheld": 4, "steps": 0}


def stale(clock=StreamClock.FORWARD, unchanged=7, compared=8, steps=100, ranks=2, odd=None, **more):
    now = everywhere(ranks, 64, odd=odd, **{**STALE, **more})
    seen = stream(clock=clock, ranks=ranks, last_number=64, values=((64, now),), unchanged=unchanged, compared=compared)
    return judged(seen, ranks=ranks, steps=steps)[0]


def test_an_optimizer_that_holds_what_the_model_was():
    (found,) = stale()
    assert (found.code, found.kind, found.severity, found.ranks) == ("DD508", "stale-optimizer", Severity.ERROR, (0, 1))
    assert found.step == 1
    assert "4 tensors that are not in the model" in found.summary
    assert "create the optimizer" in found.fix


NOT_STALE = {
    "parameters change, as with master copies": {"unchanged": 0},
    "one step without a change": {"unchanged": 1},
    "all is held": {"unheld": 0},
    "nothing else is held: the rest is frozen by leaving it out": {"stray": 0},
    "a prompt is trained through the model": {"stray": 1},
    "no step was made": {"steps": 0},
    "nothing was reduced": {"reductions": 0},
    "one rank holds its parameters": {"odd": {1: {"unheld": 0}}},
}


@pytest.mark.parametrize("name", NOT_STALE)
def test_no_stale_optimizer(name):
    more = dict(NOT_STALE[name])
    steps = more.pop("steps", 100)
    assert stale(steps=steps, **more) == []


HEAD = {"replaced": ("head.weight", "head.bias"), "unheld": 2, "stray": 2, "steps": 100, "unchanged": 0}


def test_a_layer_that_was_replaced_after_the_optimizer_was_made():
    (found,) = stale(clock=StreamClock.STEP, **HEAD)
    assert (found.code, found.ranks, found.tensor) == ("DD508", (0, 1), "head.weight")
    assert "no optimizer has head.weight, head.bias" in found.summary


NO_PART = {
    "no tensors of the same shapes": {"replaced": ()},
    "one rank holds them": {"odd": {1: {"replaced": ()}}},
    "no optimizer of the model": {"clock": StreamClock.FORWARD},
    "nothing was reduced": {"reductions": 0},
    "too few steps": {"compared": 2},
}


@pytest.mark.parametrize("name", NO_PART)
def test_no_part_is_stale(name):
    assert stale(**{"clock": StreamClock.STEP, **HEAD, **NO_PART[name]}) == []


def test_parameters_that_changed_once_leave_the_first_step_open():
    assert [found.step for found in stale(unchanged=3)] == [None]


def test_too_few_comparisons_prove_no_change():
    few = stream(clock=StreamClock.FORWARD, compared=2, values=((2, everywhere(2, 2)),), last_number=2)
    assert outcome("DD508", few)[0] is Outcome.SKIPPED
    assert outcome("DD508", replace(few, compared=3)) == PASSED


DROPS = everywhere(2, 100, dropout=True)


def test_equal_random_states_with_dropout_are_reported_and_are_no_verdict():
    seen = stream(now=DROPS, same_random=8)
    findings = judged(seen, stream(now=DROPS, same_random=8, model=2))[0]
    assert [(found.code, found.severity, found.ranks) for found in findings] == [("DD507", Severity.INFO, (0, 1))]
    assert verdict(seen) is None


RANDOM = {
    "different": (stream(now=DROPS, same_random=0), PASSED),
    "equal at the start only": (stream(now=DROPS, same_random=1), PASSED),
    "no dropout": (stream(same_random=8), (Outcome.SKIPPED, "no models that train with dropout were compared")),
    "one moment": (stream(now=DROPS, same_random=1, compared=1), (Outcome.SKIPPED, None)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_states_that_are_not_known(name):
    seen, (expected, reason) = RANDOM[name]
    assert codes(seen) == []
    assert outcome("DD507", seen)[0] is expected
    assert reason in (None, outcome("DD507", seen)[1])


def test_many_sides_are_counted():
    found = verdict(stream(difference(What.PARAMETER, sides=apart(64)), ranks=64), ranks=64)
    assert found.ranks == tuple(range(64))
    assert any("no two ranks are equal" in sentence for sentence in found.evidence)
    assert all(len(sentence) < 200 for sentence in found.evidence)


ADDED = {"untrained": ("head.weight", "head.bias"), "untrained_count": 2, "late": 2, "steps": 100, "stray": 0}


def test_parameters_added_after_the_optimizer_was_made():
    (found,) = stale(clock=StreamClock.STEP, unchanged=0, **ADDED)
    assert (found.code, found.severity, found.ranks, found.tensor) == ("DD508", Severity.ERROR, (0, 1), "head.weight")
    assert "no optimizer has head.weight, head.bias on ranks 0 and 1: added or replaced in the model" in found.summary
    assert "add_param_group" in found.fix


def test_more_than_are_named_are_counted():
    (found,) = stale(clock=StreamClock.STEP, unchanged=0, **{**ADDED, "untrained_count": 40, "late": 30})
    assert "head.weight, head.bias and 28 more" in found.summary


LEFT_OUT = {"there before the optimizer": {"late": 0}, "later on one rank only": {"odd": {1: {"late": 0}}}}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_parameters_left_out_of_the_optimizer_are_a_note(name):
    (found,) = stale(clock=StreamClock.STEP, unchanged=0, **{**ADDED, **LEFT_OUT[name]})
    assert (found.code, found.severity, found.confidence) == ("DD508", Severity.INFO, Confidence.LOW)


def test_all_parameters_are_held_or_change():
    assert stale(clock=StreamClock.STEP, unchanged=0, **{**ADDED, "untrained": (), "late": 0}) == []
    assert stale(clock=StreamClock.FORWARD, unchanged=0, **ADDED) == []
    assert stale(clock=StreamClock.STEP, unchanged=0, odd={1: {"untrained": (), "late": 0}}, **ADDED) == []
