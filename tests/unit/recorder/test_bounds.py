"""What the recorder keeps is bounded, whatever a script does for however long; what matters always finds room."""

import weakref
from pathlib import Path

import pytest
import torch

from ddpdoctor.recorder.replicas import optimizers
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_reading import read_ring_file
from ddpdoctor.recorder.storage.ring_writing import Ring


def test_the_last_room_is_for_what_a_verdict_rests_on(tmp_path: Path) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=1, start_ticks=1)
    while ring.note({"k": "filler", "text": "x" * 500}):
        pass
    assert ring.intern("n" * 600) == 0
    assert ring.note({"k": "raised", "text": "x" * 12_000}, vital=True)
    assert read_ring_file(ring.path).notes[-1]["k"] == "raised"


def test_a_process_that_calls_exec_takes_its_ring_along(tmp_path: Path) -> None:
    first = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=1, start_ticks=1)
    first.note({"k": "before"})
    inode = Path(first.path).stat().st_ino
    second = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=1, start_ticks=1)
    assert (Path(second.path).stat().st_ino, read_ring_file(second.path).notes) == (inode, [])
    third = Ring(str(tmp_path), ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE, pid=1, start_ticks=1)
    assert Path(third.path).stat().st_ino != inode


def test_parameters_that_came_after_an_optimizer_are_forgotten_with_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "ring", Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.CHILD_SHAPE, 1, 1))
    monkeypatch.setattr(torch.nn.modules.module, "register_module_parameter_registration_hook", lambda _hook: None)
    monkeypatch.setattr(optimizers, "_made", 0)
    monkeypatch.setattr(optimizers, "_numbers", weakref.WeakKeyDictionary())
    early, late = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    first, second = torch.optim.SGD([early]), torch.optim.SGD([late])
    optimizers._count(first)
    optimizers._registered(None, "late", late)
    optimizers._count(second)
    pairs = [(late, first), (late, second), (early, first)]
    assert [optimizers.is_later_than(*pair) for pair in pairs] == [True, False, False]
    pairs.clear()
    del late, second
    assert len(optimizers._came_after) == 0
