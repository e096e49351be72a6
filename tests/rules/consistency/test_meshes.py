"""What ranks of a device mesh hold alike: differences are reported by its dimension, and DDP is not brought in."""

from dataclasses import replace

import pytest

from ddpdoctor.model.consistency import Difference, TensorRow, TensorSplit, What
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from tests.rules.consistency.build import (
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
