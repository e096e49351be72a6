"""While a CUDA graph is captured nothing of a device is asked or read. torch's classes stand in for a GPU."""

import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ddpdoctor.recorder import capture
from ddpdoctor.recorder.calls import collectives, functional, works
from ddpdoctor.recorder.gradients import finite_checks
from ddpdoctor.recorder.replicas import fingerprinting
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from ddpdoctor.recorder.training import reductions


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def capture_begin(self, *, fails=False):
        if fails:
            raise RuntimeError("no capture")

    def capture_end(self):
        pass


capture.patch(SimpleNamespace(__name__="torch.cuda.graphs", CUDAGraph=Graph))


class Work:
    """Stands for torch.distributed.Work, and says how often it was asked."""

    def __init__(self, *, fails=False):
        self.fails = fails
        self.asked = 0

    def is_completed(self):
        self.asked += 1
        if self.fails:
            raise RuntimeError("NCCL communicator was aborted")
        return True

    def wait(self):
        return True


@pytest.fixture
def ring(tmp_path, monkeypatch):
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    monkeypatch.setattr(here, "ring", ring)
    monkeypatch.setattr(here, "main_thread", threading.get_ident())
    yield ring
    works.settle()


@contextmanager
def by_torchs_class():
    graph = Graph()
    graph.capture_begin()
    yield
    graph.capture_end()


@contextmanager
def by_the_stream():
    """Capture so that only the current stream tells: another class than torch's has begun it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "_initialized", True)
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


capturing = pytest.mark.parametrize("captures", [by_torchs_class, by_the_stream])


def slots(ring):
    return list(ring_reading.read_ring_file(ring.path).slots)


def hand_out(ring, work):
    index = ring.begin(collectives.records.kind_of(ring, sys._getframe(), "all_reduce").packed)
    works.hand_out(work, index)


def test_a_capture_is_over_however_it_ended():
    first, second = Graph(), Graph()
    first.capture_begin()
    second.capture_begin()
    first.capture_end()
    assert capture.is_capturing()
    second.capture_end()
    with pytest.raises(RuntimeError, match="no capture"):
        first.capture_begin(fails=True)
    assert not capture.is_capturing()


@capturing
def test_no_work_is_asked_while_a_graph_is_captured(ring, captures):
    works_before, work_within = [Work(), Work()], Work()
    for work in works_before:
        hand_out(ring, work)
    asked = [work.asked for work in works_before]
    with captures():
        works.settle()
        hand_out(ring, work_within)
        assert works.wrap_wait(Work.wait)(works_before[1])
        assert [work.asked for work in works_before] == asked
        assert work_within.asked == 0
    works.settle()
    assert all(slot.ended_ns for slot in slots(ring))


@capturing
def test_a_captured_call_ends_at_once(ring, captures):
    work = Work()

    with captures():
        collectives.wrap(
            "all_reduce",
            lambda tensor, group, async_op: work,  # noqa: ARG005 - as torch calls them
            "tensor",
            p2p=False,
        )(torch.ones(1), group=Group(), async_op=True)
    (slot,) = slots(ring)
    assert (slot.op, slot.seq, bool(slot.ended_ns), work.asked) == ("all_reduce", 5, True, 0)


class Group:
    """A process group that counts."""

    group_name = "0"

    def _get_sequence_number_for_group(self):
        return 4


def test_a_work_that_raises_holds_up_no_other(ring):
    aborted, after = Work(fails=True), Work()
    hand_out(ring, aborted)
    hand_out(ring, after)
    works.settle()
    assert [bool(slot.ended_ns) for slot in slots(ring)] == [True, True]
    assert not [note for note in ring_reading.read_ring_file(ring.path).notes if note["k"] == "defect"]


class Running(Work):
    """A work that has not completed."""

    def is_completed(self):
        return False


def test_of_too_many_works_the_oldest_are_followed_and_none_looks_pending_for_ever(ring):
    running = [Running() for _ in range(works.MAX_HANDED_OUT + 2)]
    for work in running:
        hand_out(ring, work)
    assert [bool(slot.ended_ns) for slot in slots(ring)] == [False] * works.MAX_HANDED_OUT + [True] * 2
    running.clear()
    works.settle()
    assert all(slot.ended_ns for slot in slots(ring))


def test_results_that_nobody_waits_for_do_not_look_pending_for_ever(tmp_path, monkeypatch):
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RingShape(2**16, 2 * functional.MAX_OUTPUTS), 43, 7)
    monkeypatch.setattr(here, "ring", ring)
    results = [torch.empty(1) for _ in range(functional.MAX_OUTPUTS + 2)]
    try:
        for tensor in [*results, results[-1]]:
            functional._keep(tensor, ring.begin(bytes(ring_layout.KIND.size)))
        awaited = [functional._outputs.get(tensor.untyped_storage()._cdata) for tensor in results]
    finally:
        functional._outputs.clear()
    ended = [bool(slot.ended_ns) for slot in slots(ring)]
    assert ended == [True] * 2 + [False] * (functional.MAX_OUTPUTS - 1) + [True, False]
    assert awaited == [None, None, *range(3, functional.MAX_OUTPUTS + 2), functional.MAX_OUTPUTS + 3]


@capturing
def test_no_tensor_is_looked_at_while_a_graph_is_captured(captures):
    with captures():
        assert not fingerprinting.may_fingerprint()
        assert finite_checks.is_observed()


@capturing
def test_the_last_look_asks_no_stream_while_a_graph_is_captured(monkeypatch, captures):
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: asked.append(1))
    with captures():
        assert not fingerprinting.gpu_is_idle()
    assert not asked


class OnGpu(SimpleNamespace):
    """A DDP model on a GPU. A plain SimpleNamespace has no weak references."""


def test_no_timer_of_ddp_is_read_that_waits_for_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the recorder writes its failures here
    ddp = OnGpu(device_type="cuda", device="cuda:0", process_group=Group(), logger=SimpleNamespace())
    reductions.reduced(ddp, 1, 2)
    assert not reductions._pending
    assert list(tmp_path.iterdir()) == []
