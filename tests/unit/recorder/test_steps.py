"""Where steps end, what they take, and at which lines the main thread is met."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.collect.rank.steps import fetch_cells, find_children, read_fetches, read_lines, read_steps
from ddpdoctor.launch.seen import WorkersSeen
from ddpdoctor.model.steps import FetchTimes, Phase, StepEnd
from ddpdoctor.recorder.calls import waiting
from ddpdoctor.recorder.data import fetches
from ddpdoctor.recorder.stacks.sampler import LineTable
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from ddpdoctor.recorder.training import reductions, step_clock, steps
from ddpdoctor.recorder.training.step_clock import StepClock

ENDS = [ring_layout.STEP_COLLECTIVE, ring_layout.STEP_BACKWARD, ring_layout.STEP_REDUCED, ring_layout.STEP_OPTIMIZER]


def make(
    tmp_path: Path,
    role: int = ring_layout.ROLE_RANK,
    shape: ring_layout.RingShape = ring_layout.RANK_SHAPE,
    pid: int = 42,
) -> Ring:
    return Ring(str(tmp_path), role, shape, pid=pid, start_ticks=7)


def read(ring: Ring) -> ring_reading.RingContent:
    return ring_reading.read_ring_file(ring.path)


def ends(*events: tuple[int, str]) -> list[int]:
    """Return which of the events, a level and a key each, end a step."""
    clock = StepClock()
    return [i for i, event in enumerate(events) if clock.ends_step(*event)]


def test_the_first_end_that_comes_again_ends_each_step() -> None:
    a, b = (ring_layout.STEP_COLLECTIVE, "a"), (ring_layout.STEP_COLLECTIVE, "b")
    assert ends(a, b, a, b, a, b) == [0, 2, 4]


def test_an_end_that_does_not_come_again_gives_way() -> None:
    setup, a, b = ((ring_layout.STEP_COLLECTIVE, name) for name in ("setup", "a", "b"))
    assert ends(setup, a, b, a, b, a) == [0, 3, 5]


def test_a_better_mark_of_steps_takes_over() -> None:
    kinds = [(level, "x") for level in ENDS]
    assert ends(*kinds, *kinds, *kinds) == [0, 1, 2, 3, 7, 11]


def test_two_models_with_an_optimizer_each_make_one_step() -> None:
    reduced, first, second = (
        (ring_layout.STEP_REDUCED, "d"),
        (ring_layout.STEP_OPTIMIZER, "d"),
        (ring_layout.STEP_OPTIMIZER, "g"),
    )
    iteration = (reduced, first, reduced, second)
    assert ends(*iteration, *iteration, *iteration) == [0, 1, 5, 9]


def test_steps_are_counted_anew_under_a_better_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make(tmp_path)
    monkeypatch.setattr(here, "ring", ring)
    clock = StepClock()
    for _ in range(7):
        assert clock.ends_step(ring_layout.STEP_COLLECTIVE, "site")
        clock.take().write()
    for _ in range(3):
        assert clock.ends_step(ring_layout.STEP_OPTIMIZER, 1)
        clock.take().write()
    times = read_steps(read(ring))
    assert times is not None
    assert (times.ends_with, list(times.numbers)) == (StepEnd.OPTIMIZER, [1, 2, 3])


def test_time_goes_to_the_phase_in_which_it_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock()
    monkeypatch.setattr(waiting, "clock", clock)
    for phase in (
        ring_layout.BEFORE,
        ring_layout.FORWARD,
        ring_layout.BETWEEN,
        ring_layout.BACKWARD,
        ring_layout.BEFORE,
    ):
        clock.enter(phase)
    began = waiting.begin_wait()
    assert waiting.begin_wait() == 0, "a wait inside a wait counts once"
    assert clock.waiting
    waiting.end_wait(began, counts=True)
    assert not clock.waiting
    waiting.end_wait(waiting.begin_wait(), counts=False)
    waited = clock.waits[ring_layout.BEFORE]
    ended = clock.take()
    assert all(spent > 0 for spent in ended.spent)
    assert ended.waits == [waited, 0, 0, 0]
    assert 0 < waited <= ended.spent[ring_layout.BEFORE]
    assert clock.spent == clock.waits == [0, 0, 0, 0]


def test_a_wait_for_the_buffers_of_rank_0_is_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make(tmp_path)
    monkeypatch.setattr(here, "ring", ring)
    module = SimpleNamespace(forward=None, _sync_buffers=lambda: ring.get("wait_since_ns"), __name__="Model")
    steps.patch_ddp(module)
    assert module._sync_buffers() > 0
    assert ring.get("wait_since_ns") == 0


def test_a_ring_keeps_the_last_steps(tmp_path: Path) -> None:
    ring = make(tmp_path)
    group = ring.intern("7")
    for number in range(1, 301):
        ring.step(number, number * 10, group, ring_layout.STEP_REDUCED, [number, 2, 3, 2**32 - 1], [0, 0, 0, number])
    times = read_steps(read(ring))
    assert times is not None
    assert (times.ends_with, times.group, list(times.numbers)) == (StepEnd.REDUCTION, "7", list(range(45, 301)))
    assert [column[-1] for column in times.phases_us] == [300, 2, 3, 2**32 - 1]
    assert [column[0] for column in times.waits_us] == [0, 0, 0, 45]


def test_a_ring_without_steps_shows_none(tmp_path: Path) -> None:
    assert read_steps(read(make(tmp_path))) is None
    child = make(tmp_path, ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE, pid=43)
    child.step(1, 1, 0, 0, [0] * 4, [0] * 4)
    assert read_steps(read(child)) is None


def test_a_step_whose_wait_is_not_known_is_left_out_and_counted(tmp_path: Path) -> None:
    ring = make(tmp_path)
    for number, flags in ((1, ring_layout.STEP_REDUCED), (2, ring_layout.STEP_REDUCED | ring_layout.STEP_WAIT_UNKNOWN)):
        ring.step(number, number, 0, flags, [1] * 4, [0] * 4)
    times = read_steps(read(ring))
    assert times is not None
    assert (list(times.numbers), times.unknown) == ([1], 1)


def test_on_a_gpu_no_wait_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: True))  # type: ignore[arg-type]
    assert StepClock().take().flags & ring_layout.STEP_WAIT_UNKNOWN


def test_the_waits_of_about_one_step_in_four_are_read_once_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        group_name = "7"

    class Model:
        device_type = "cpu"
        logger = object()
        process_group = Group()

    monkeypatch.setattr(here, "ring", make(tmp_path))
    model, read_in = Model(), []
    for number in range(1, 81):
        clock, pending = StepClock(), dict[int, reductions.Reduction]()
        clock.number = number - 1
        monkeypatch.setattr(reductions, "clock", clock)
        monkeypatch.setattr(reductions, "_pending", pending)
        reductions.reduced(model, 1, 2)
        assert clock.unknown != bool(pending)
        read_in += [number] if pending else []
        pending.clear()
    assert read_in == [*range(1, 65), 65, 68, 73, 78]


def at(line: int, function: str = "load") -> tuple[str, int, str]:
    return __file__, line, function


def test_lines_are_counted_by_phase_outside_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock()
    monkeypatch.setattr(here, "is_rank", True)
    ring, table = make(tmp_path), LineTable()
    table.count(ring, clock, at(1))  # before the first step: imports, setup
    clock.number = 1
    for _ in range(3):
        table.count(ring, clock, at(2))
    clock.phase = ring_layout.BACKWARD
    table.count(ring, clock, at(2))
    clock.waiting = True
    table.count(ring, clock, at(3))
    seen = read_lines(read(ring), ())
    assert [(s.frame.line, s.phase, s.times) for s in seen] == [(2, Phase.BEFORE, 3), (2, Phase.BACKWARD, 1)]


def test_a_full_table_gives_up_its_rarest_line(tmp_path: Path) -> None:
    ring, table = make(tmp_path, ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE), LineTable()
    for line in range(1, ring_layout.CHILD_SHAPE.lines + 2):
        for _ in range(1 if line == 5 else 2):
            table.count(ring, StepClock(), at(line))
    seen = {s.frame.line for s in read_lines(read(ring), ())}
    assert seen == set(range(1, ring_layout.CHILD_SHAPE.lines + 2)) - {5}


def test_a_forked_child_counts_for_itself_and_belongs_to_its_parent(tmp_path: Path) -> None:
    table, rank = LineTable(), make(tmp_path)
    for _ in range(5):
        table.count(rank, StepClock(), at(1))
    child = make(tmp_path, ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE, pid=43)
    child.note({"k": "process", "ppid": 42})
    LineTable().count(child, StepClock(), at(1))
    contents = {42: read(rank), 43: read(child)}
    seen = read_lines(contents[42], find_children(contents)[42])
    assert [(s.times, s.in_child) for s in seen] == [(5, False), (1, True)]


def test_children_of_a_fork_server_work_for_the_rank_that_started_it(tmp_path: Path) -> None:
    server, worker = (make(tmp_path, ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE, pid=pid) for pid in (43, 44))
    server.note({"k": "process", "ppid": 42})
    worker.note({"k": "process", "ppid": 43})
    worker.fetched(3, 3_000_000, 1_000_000, 2_000_000)
    contents = {42: read(make(tmp_path)), 43: read(server), 44: read(worker)}
    found = read_fetches(find_children(contents)[42])
    assert found == FetchTimes(batches=3, making_ms=3.0, pauses_ms=1.0, cpu_ms=2.0)
    assert (found.busy_share, found.batch_ms) == (0.75, 1.0)
    kept = WorkersSeen()
    kept.keep(Path(worker.path))
    assert read_fetches((), kept.fetches(42)) == found
    assert read_fetches((), ()) is None
    assert read_fetches((), (1, 2)) is None


def test_no_pause_of_a_worker_counts_for_more_than_the_batch_after_it(tmp_path: Path) -> None:
    ring, times = make(tmp_path, ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE), fetches.WorkerTimes()
    for began_ns, ended_ns in ((0, 10), (15, 25), (1000, 1020)):
        times.add(ring, began_ns, ended_ns)
    assert fetch_cells(read(ring)) == (3, 40, 25, 0)
    forked = make(tmp_path, ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE, pid=43)
    times.add(forked, 2000, 2010)
    assert fetch_cells(read(forked)) == (1, 10, 0, 0)


def test_batches_are_timed_once_and_errors_read_as_without_us() -> None:
    class Fetcher:
        def fetch(self, index: int) -> int:
            return 10 // index

    module = SimpleNamespace(_MapDatasetFetcher=Fetcher)
    fetches.patch(module)
    once = Fetcher.fetch
    fetches.patch(module)
    assert Fetcher.fetch is once
    assert Fetcher().fetch(5) == 2
    with pytest.raises(ZeroDivisionError) as caught:
        Fetcher().fetch(0)
    assert [Path(entry.path).name for entry in caught.traceback] == ["test_steps.py"] * 2


def test_durations_that_32_bits_do_not_hold_are_cut() -> None:
    assert step_clock._us([1999, 0, 10**18, 5000]) == [1, 0, 2**32 - 1, 5]


def test_the_lines_of_ended_children_are_kept_without_their_rings(tmp_path: Path) -> None:
    kept = WorkersSeen()
    for pid in (43, 44):
        ring, table = make(tmp_path, ring_layout.ROLE_CHILD, ring_layout.CHILD_SHAPE, pid=pid), LineTable()
        ring.note({"k": "process", "ppid": 42})
        table.count(ring, StepClock(), at(17))
        ring.fetched(1, 10, 2)
        kept.keep(Path(ring.path))
        Path(ring.path).unlink()
    kept.keep(tmp_path / "gone.ring")
    assert kept.fetches(42) == [2, 20, 4, 0]
    assert kept.fetches(7) == []
    assert kept.rows(42) == [[__file__, 17, "load", 2]]
    assert kept.rows(7) == []
    seen = read_lines(read(make(tmp_path)), (), kept.rows(42))
    assert [(s.frame.line, s.times, s.in_child) for s in seen] == [(17, 2, True)]
