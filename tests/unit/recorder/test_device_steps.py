"""Phases of a step on a GPU: what is marked, what is read and when, with a stand-in for torch.cuda."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.collect.rank.device_steps import read_device_steps
from ddpdoctor.recorder.speed import device_steps
from ddpdoctor.recorder.speed.device_steps import ONE_IN, GpuClock
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.device_columns import OPTIMIZER
from ddpdoctor.recorder.storage.ring_writing import Ring
from ddpdoctor.recorder.training.step_clock import EndedStep, StepInside, clock


class Gpu:
    """A GPU that is at a time of its own, in milliseconds, and whose queue holds marks."""

    def __init__(self) -> None:
        self.queued_ms = self.at_ms = 0.0
        self.made = 0
        self.is_capturing = False
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                gpu.made += 1
                self.ms = -1.0

            def record(self, stream: str) -> None:
                assert stream == "stream of cuda:1"
                assert not gpu.is_capturing
                self.ms = gpu.queued_ms

            def query(self) -> bool:
                assert not gpu.is_capturing
                return self.ms <= gpu.at_ms

            def elapsed_time(self, end: Any) -> float:
                assert end.query(), "elapsed_time of an event that has not passed raises"
                return float(end.ms - self.ms)

        self.Event = Event

    @staticmethod
    def current_stream(device: str) -> str:
        return f"stream of {device}"

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    @staticmethod
    def is_initialized() -> bool:
        return True

    _initialized = True


class Ddp:
    """A model, and DDP's timers of it."""

    def __init__(self) -> None:
        self.device = "cuda:1"
        self.times = {"iteration": 0, "backward_comm_time": 0, "backward_compute_comm_overlap_time": 0}
        self.logger = SimpleNamespace(_get_ddp_logging_data=lambda: SimpleNamespace(ints_map=self.times))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    cuda = Gpu()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    monkeypatch.setattr(device_steps, "measured", GpuClock())
    monkeypatch.setattr(here, "ring", Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, 42, 7))
    monkeypatch.setattr(here, "failures", 0)
    yield cuda
    clock.on_phase = None
    assert here.failures == 0


PHASES_MS = {
    ring_layout.BEFORE: 2.0, ring_layout.FORWARD: 30.0, ring_layout.BETWEEN: 1.0, ring_layout.BACKWARD: 60.0,
    OPTIMIZER: 5.0,
}  # fmt: skip


def step(gpu: Gpu, ddp: Any, number: int, *, behind_ms: float = 0.0) -> None:
    """Make a step whose phases take ``PHASES_MS``; the GPU is so far behind its queue."""
    for phase, took in PHASES_MS.items():
        if phase != ring_layout.BEFORE and clock.on_phase is not None:
            clock.on_phase(phase)
        gpu.queued_ms += took
        gpu.at_ms = max(gpu.at_ms, gpu.queued_ms - behind_ms)
        if phase == ring_layout.FORWARD:
            device_steps.forward_ended(ddp)
        if phase == ring_layout.BACKWARD:
            device_steps.model_reduced(ddp)
    inside = StepInside()
    inside.data, inside.rows = 1_500_000, 8
    device_steps.step_ended(EndedStep(number, 0, 0, 0, [0] * 4, [0] * 4, inside))


def read() -> Any:
    assert here.ring is not None
    return read_device_steps(ring_reading.read_ring_file(here.ring.path).notes)


def test_one_step_in_twenty_is_measured_by_phases_and_read_once_it_is_over(gpu: Gpu) -> None:
    ddp = Ddp()
    for number in range(1, 10 * ONE_IN):
        step(gpu, ddp, number, behind_ms=150.0)
    device_steps.settle_all()
    found = read()
    assert list(found.numbers) == [1 + ONE_IN * i for i in range(1, 10)]
    for phase, took in zip(("before", "forward", "between", "backward", "optimizer"), PHASES_MS.values(), strict=True):
        assert found.device_ms[phase] == pytest.approx([took] * 9)
    assert set(found.data_ms) == {1.5}
    assert set(found.input_rows) == {8}
    assert min(found.behind) > 0


def test_a_gpu_that_keeps_up_is_never_behind_and_events_are_used_again(gpu: Gpu) -> None:
    ddp = Ddp()
    for number in range(1, 10 * ONE_IN):
        step(gpu, ddp, number)
    device_steps.settle_all()
    assert set(read().behind) == {0}
    assert gpu.made == len(PHASES_MS) + 1


def test_a_gpu_that_stands_still_is_asked_and_not_waited_for(gpu: Gpu) -> None:
    ddp = Ddp()
    for number in range(1, 20 * ONE_IN):
        step(gpu, ddp, number, behind_ms=1e9)
    device_steps.settle_all()
    assert read() is None
    assert gpu.made <= (device_steps.MAX_PENDING + 2) * (len(PHASES_MS) + 1)


def test_steps_in_which_a_graph_is_captured_are_left_out(gpu: Gpu) -> None:
    ddp = Ddp()
    for number in range(1, 4 * ONE_IN):
        gpu.is_capturing = number == 2 * ONE_IN + 1
        step(gpu, ddp, number)
    gpu.is_capturing = False
    device_steps.settle_all()
    assert list(read().numbers) == [1 + ONE_IN, 1 + 3 * ONE_IN]


def test_the_times_of_reductions_are_those_of_the_iterations_that_torch_times(gpu: Gpu) -> None:
    ddp = Ddp()
    for number in range(1, 250):
        if number - 1 in {*range(1, 11), 100, 200}:  # torch reads its timers at the beginning of the next forward
            ddp.times = {
                "iteration": number - 1, "backward_comm_time": 9_000_000,
                "backward_compute_comm_overlap_time": 2_000_000,
            }  # fmt: skip
        step(gpu, ddp, number)
    device_steps.settle_all()
    assert read().exposed_ms == dict.fromkeys([*range(1, 11), 100, 200], 7.0)


def test_a_job_without_a_gpu_marks_nothing(gpu: Gpu) -> None:
    for number in range(1, 4 * ONE_IN):
        inside = StepInside()
        device_steps.step_ended(EndedStep(number, 0, 0, 0, [0] * 4, [0] * 4, inside))
    assert (gpu.made, clock.on_phase) == (0, None)
