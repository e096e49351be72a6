"""What the recorder keeps of real processes is bounded, however long they run; what a verdict rests on finds room."""

from pathlib import Path

from ddpdoctor.recorder.storage import ring_layout
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
