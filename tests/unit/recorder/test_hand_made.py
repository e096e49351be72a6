"""Which calls of all_reduce count as reductions of the optimizer's gradients."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.recorder.speed import hand_made
from ddpdoctor.recorder.state import here

torch = pytest.importorskip("torch")

SHAPES = (4, 4), (4,), (2, 4)


class Notes(list[Any]):
    """Stands for a ring."""

    note = list.append


def noted(monkeypatch: pytest.MonkeyPatch, given: Any, reductions: Any = ()) -> list[Any]:
    """Return what is noted of a step in which all_reduce gets ``given(parameters)``."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    ring = Notes()
    monkeypatch.setattr(here, "ring", ring)
    monkeypatch.setattr(hand_made, "_frame", None)
    monkeypatch.setattr(hand_made.clock, "inside", SimpleNamespace(reductions=dict(reductions)))
    monkeypatch.setattr(hand_made.frames, "describe_user", lambda frame: frame)
    for tensor in given(parameters):
        hand_made.reduction_begins(tensor, "line 9")
    hand_made.optimizer_begins(SimpleNamespace(param_groups=[{"params": parameters}]))
    return [(one["gradients"], one["copied"], one["frame"]) for one in ring]


def gradients(parameters: Any) -> Any:
    return [p.grad for p in parameters]


def copies(parameters: Any) -> Any:
    return [p.grad.clone() for p in parameters]


def metrics(_: Any) -> Any:
    return [torch.zeros(()) for _ in range(40)]


def weights(parameters: Any) -> Any:
    return [p.data for p in parameters]


def flat(parameters: Any) -> Any:
    return [torch.cat([p.grad.flatten() for p in parameters])]


def test_gradients_and_their_copies_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted(monkeypatch, gradients) == [(3, False, "line 9")]
    assert noted(monkeypatch, copies) == [(3, True, "line 9")]


@pytest.mark.parametrize("given", [metrics, weights, flat, lambda parameters: copies(parameters)[1:]])
def test_other_tensors_are_not(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not noted(monkeypatch, given)


def test_copies_beside_ddp_are_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not noted(monkeypatch, copies, reductions={1: 1})
