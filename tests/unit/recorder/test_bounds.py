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
from tests.scenarios.harmless.alone import defects, make_folder, read_rings, run_recorded

CHILDREN = """
import multiprocessing, os, sys
def work(code): os._exit(code)
def main():
    context = multiprocessing.get_context("fork")
    for number in range(int(sys.argv[1])):
        child = context.Process(target=work, args=(number % 2,))
        child.start()
        child.join()
    raise LookupError("the end")
if __name__ == "__main__":
    main()
"""
SITES = """
import gc, sys, weakref
from _ddpdoctor_recorder.calls import collectives
from _ddpdoctor_recorder.state import here
codes = []
for number in range(20000):
    names = {}
    source = "def f():\\n" + "\\n" * number + " return begin('all_reduce')"
    exec(compile(source, "made.py", "exec"), {"begin": lambda op: collectives.begin(op)}, names)
    names["f"]()
    codes.append(weakref.ref(names["f"].__code__))
names = None
gc.collect()
print(sum(code() is not None for code in codes))
raise LookupError("the end")
"""
MANY_CALLS = """
import os, torch, torch.distributed as dist
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
dist.init_process_group("gloo")
tensor, seen = torch.ones(1), []
for number in range(40_001):
    dist.all_reduce(tensor)
    if number % 10_000 == 0 and number:
        seen.append(resident())
for number in range(300):
    group = dist.new_group([0])
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
del group
from _ddpdoctor_recorder.calls import groups
print(seen[-1] - seen[0], len(groups._known))
"""


def raised(folder: Path) -> list[str]:
    (ring,) = read_rings(folder)
    return [note["type"] for note in ring.notes if note.get("k") == "raised"]


def folder_size(folder: Path) -> int:
    sizes = [path.stat().st_size for path in folder.rglob("*.ring")]
    return sum(size for size in sizes if size > ring_layout.CHILD_SHAPE.total_bytes)


def test_ends_of_many_children_leave_room_for_the_crash(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    (tmp_path / "script.py").write_text(CHILDREN)
    run_recorded(folder, str(tmp_path / "script.py"), "300")
    (ring,) = read_rings(folder)
    assert len([note for note in ring.notes if note.get("k") == "child_end"]) == 64
    assert raised(folder) == ["LookupError"]
    assert defects(folder) == []
    assert list(folder.glob("lost-*")) == []


def test_code_that_is_made_at_run_time_is_let_go_and_leaves_room_for_the_crash(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    done = run_recorded(folder, "-c", SITES)
    assert int(done.stdout) < 10, done.stderr.decode()
    assert raised(folder) == ["LookupError"]


def test_calls_and_groups_leave_nothing_behind(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    done = run_recorded(folder, "-c", MANY_CALLS, OMP_NUM_THREADS="1")
    assert done.status == 0, done.stderr.decode()
    grown, groups = map(int, done.stdout.split())
    assert grown < 2**20
    assert groups < 20
    assert folder_size(folder) == ring_layout.RANK_SHAPE.total_bytes


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
