"""What collectives of objects do in Python counts as a part of the call, where all ranks wait for it."""

import time
from types import SimpleNamespace

import pytest

from ddpdoctor.recorder.calls import objects
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.training.step_clock import clock

PICKLING_S = 0.01


def pickle(_: object) -> None:
    time.sleep(PICKLING_S)


def all_gather_object(helper):
    helper("x")


def broadcast_object_list(helper):
    [helper(one) for one in ("x", "y")]


def gather_object(helper):
    helper("x")


@pytest.mark.parametrize(("call", "pickled"), [(all_gather_object, 1), (broadcast_object_list, 2), (gather_object, 0)])
def test_pickling_counts_where_all_ranks_wait_for_it(call, pickled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "waits", [0, 0, 0, 0])
    monkeypatch.setattr(clock, "waiting", False)
    call(objects.count(pickle))
    assert clock.waits[clock.phase] / 1e9 >= PICKLING_S * pickled
    assert bool(clock.waits[clock.phase]) == bool(pickled)


def test_another_thread_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "waits", [0, 0, 0, 0])
    monkeypatch.setattr(here, "main_thread", here.main_thread + 1)
    all_gather_object(objects.count(pickle))
    assert not any(clock.waits)


def test_both_helpers_of_torch_are_found() -> None:
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    own = SimpleNamespace(__name__="c10d", **{name: getattr(c10d, name) for name in objects.HELPERS})
    objects.patch(own)
    assert all(hasattr(getattr(own, name), "__wrapped__") for name in objects.HELPERS)
