"""What ranks of a device mesh hold alike: differences are reported by its dimension, and DDP is not brought in."""

from dataclasses import replace

from ddpdoctor.model.consistency import What

from .build import against, difference, everywhere, judged, stream, verdict

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
