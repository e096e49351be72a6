"""What calls share is worked out once, and for each line, shape, group and caller by itself."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.recorder.calls import records
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)


def call(ring: Ring, op: str = "all_reduce", shape: Any = (), redop: str = "", peer: int = ring_layout.NO_PEER) -> None:
    kind = records.kind_of(ring, sys._getframe(1), op, 0, "float32", shape, 1, redop, peer, ring_layout.FLAG_MAIN)
    ring.end(ring.begin(kind.packed))


def slots(ring: Ring) -> list[ring_reading.CallSlot]:
    return list(ring_reading.read_ring_file(ring.path).slots)


def test_a_call_that_comes_again_is_worked_out_once(ring: Ring) -> None:
    for _ in range(3):
        call(ring, shape=(4,))
    assert len(ring.kinds) == 1
    assert [slot.shape for slot in slots(ring)] == [(4,)] * 3


def test_what_a_line_is_given_may_change_from_call_to_call(ring: Ring) -> None:
    given = [("all_reduce", (4,), "SUM", -1), ("all_reduce", (5,), "SUM", -1), ("all_reduce", (5,), "MAX", -1),
             ("send", (5,), "", 1), ("send", (5,), "", 2), ("all_reduce", (4,), "SUM", -1)]  # fmt: skip
    for op, shape, redop, peer in given:
        call(ring, op, shape, redop, peer)
    assert [(slot.op, slot.shape, slot.redop, slot.peer) for slot in slots(ring)] == given
    assert len({slot.site["l"] for slot in slots(ring) if slot.site}) == 1


def test_two_calls_of_one_line_and_calls_of_two_lines(ring: Ring) -> None:
    call(ring), call(ring, "barrier")
    call(ring)
    first, second, third = slots(ring)
    assert first.site is not None
    assert first.site == second.site
    assert (first.op, second.op) == ("all_reduce", "barrier")
    assert third.site is not None
    assert third.site["l"] == first.site["l"] + 1


def library(name: str) -> Any:
    """Return a function that calls what it is given, in a file of torch.distributed's."""
    names: dict[str, Any] = {}
    path = "/x/site-packages/torch/distributed/made.py"
    exec(compile(f"def {name}(f, *args): f(*args)", path, "exec"), names)
    return names[name]


def test_a_call_that_torch_makes_stands_at_each_line_that_asked_for_it(ring: Ring) -> None:
    for name in ("all_gather_object", "broadcast_object_list"):
        for _ in range(2):
            library(name)(call, ring)
    gathered = library("all_gather_object")
    gathered(call, ring)
    gathered(call, ring)
    found = [(slot.api, slot.site["l"] if slot.site else 0) for slot in slots(ring)]
    first, (api, line) = found[0], found[-2]
    assert [name for name, _ in found[:4]] == ["all_gather_object"] * 2 + ["broadcast_object_list"] * 2
    assert {number for _, number in found[:4]} == {first[1]}
    assert (api, found[-1]) == ("all_gather_object", ("all_gather_object", line + 1))


def test_a_kind_goes_with_the_code_that_made_the_call(ring: Ring) -> None:
    for number in range(50):
        names: dict[str, Any] = {}
        exec(compile("\n" * number + "def f(): call(ring)", "made.py", "exec"), {"call": call, "ring": ring}, names)
        names["f"]()
    names.clear()
    gc.collect()
    assert not ring.kinds
    assert [slot.site["l"] for slot in slots(ring) if slot.site] == list(range(1, 51))


def test_kinds_are_bounded(ring: Ring) -> None:
    for size in range(records.MAX_KINDS + 10):
        call(ring, shape=(size,))
    assert len(ring.kinds) <= records.MAX_KINDS
    assert slots(ring)[-1].shape == (records.MAX_KINDS + 9,)
