"""What the recorder does beside a GPU: phases of a step, captures of graphs, and what looks at gradients cost."""

import math
import sys
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddpdoctor.collect.recorded import read_device_steps
from ddpdoctor.recorder import calls, device_times, fingerprinting, functional, gradient_checks, step_clock, steps
from ddpdoctor.recorder.device_times import STEPS_ONE_IN, GpuClock
from ddpdoctor.recorder.fingerprint import Reader, _of_known_dtype
from ddpdoctor.recorder.gradient_checks import Maxima, samples_of
from ddpdoctor.recorder.gradients import GradientWatch
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.step_clock import ClockStep, clock
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_layout import OPTIMIZER
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.unit.recorder.test_local_gradients import NAN, Trained

# Phases of a step on a GPU: what is marked, what is read and when, with a stand-in for torch.cuda.


class Gpu:
    """A GPU that is at a time of its own, in milliseconds, and whose queue holds marks."""

    def __init__(self):
        self.queued_ms = self.at_ms = 0.0
        self.made = 0
        self.is_capturing = False
        gpu = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing
                gpu.made += 1
                self.ms = -1.0

            def record(self, stream):
                assert stream == "stream of cuda:1"
                assert not gpu.is_capturing
                self.ms = gpu.queued_ms

            def query(self):
                assert not gpu.is_capturing
                return self.ms <= gpu.at_ms

            def elapsed_time(self, end):
                assert end.query(), "elapsed_time of an event that has not passed raises"
                return float(end.ms - self.ms)

        self.Event = Event

    @staticmethod
    def current_stream(device):
        return f"stream of {device}"

    def is_current_stream_capturing(self):
        return self.is_capturing

    @staticmethod
    def is_initialized():
        return True

    _initialized = True


class Ddp:
    """A model, and DDP's timers of it."""

    def __init__(self):
        self.device = "cuda:1"
        self.times = {"iteration": 0, "backward_comm_time": 0, "backward_compute_comm_overlap_time": 0}
        self.logger = SimpleNamespace(_get_ddp_logging_data=lambda: SimpleNamespace(ints_map=self.times))


@pytest.fixture
def gpu(monkeypatch, ring):  # noqa: ARG001 - it is where the times are noted
    cuda = Gpu()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    monkeypatch.setattr(device_times, "measured", GpuClock())
    monkeypatch.setattr(here, "failures", 0)
    yield cuda
    clock.on_phase = None
    assert here.failures == 0


PHASES_MS = {
    ring_layout.BEFORE: 2.0, ring_layout.FORWARD: 30.0, ring_layout.BETWEEN: 1.0, ring_layout.BACKWARD: 60.0,
    OPTIMIZER: 5.0,
}  # fmt: skip


def step(gpu, ddp, number, *, behind_ms=0.0):
    """Make a step whose phases take ``PHASES_MS``; the GPU is so far behind its queue."""
    for phase, took in PHASES_MS.items():
        if phase != ring_layout.BEFORE and clock.on_phase is not None:
            clock.on_phase(phase)
        gpu.queued_ms += took
        gpu.at_ms = max(gpu.at_ms, gpu.queued_ms - behind_ms)
        if phase == ring_layout.FORWARD:
            device_times.measured.forward_ended(ddp)
        if phase == ring_layout.BACKWARD:
            device_times.measured.model_reduced(ddp)
    ended = ClockStep()
    ended.number, ended.data, ended.rows = number, 1_500_000, 8
    device_times.measured.step_ended(ended)


def read():
    assert here.ring is not None
    return read_device_steps(ring_reading.read_ring_file(here.ring.path).notes)


def train(gpu, steps, *, behind_ms=0.0, captured=()):
    ddp = Ddp()
    for number in range(1, steps * STEPS_ONE_IN):
        gpu.is_capturing = number in captured
        step(gpu, ddp, number, behind_ms=behind_ms)
    gpu.is_capturing = False
    device_times.measured.settle()
    return read()


def test_one_step_in_twenty_is_measured_by_phases_and_read_once_it_is_over(gpu):
    found = train(gpu, 10, behind_ms=150.0)
    assert list(found.numbers) == [1 + STEPS_ONE_IN * i for i in range(1, 10)]
    for phase, took in zip(("before", "forward", "between", "backward", "optimizer"), PHASES_MS.values(), strict=True):
        assert found.device_ms[phase] == pytest.approx([took] * 9)
    assert (set(found.data_ms), set(found.input_rows), min(found.behind) > 0) == ({1.5}, {8}, True)


def test_a_gpu_that_keeps_up_is_never_behind_and_events_are_used_again(gpu):
    assert set(train(gpu, 10).behind) == {0}
    assert gpu.made == len(PHASES_MS) + 1


def test_a_gpu_that_stands_still_is_asked_and_not_waited_for(gpu):
    assert train(gpu, 20, behind_ms=1e9) is None
    assert gpu.made <= (device_times.MAX_PENDING + 2) * (len(PHASES_MS) + 1)


def test_steps_in_which_a_graph_is_captured_are_left_out(gpu):
    found = train(gpu, 4, captured=[2 * STEPS_ONE_IN + 1])
    assert list(found.numbers) == [1 + STEPS_ONE_IN, 1 + 3 * STEPS_ONE_IN]


def test_the_times_of_reductions_are_those_of_the_iterations_that_torch_times(gpu):
    ddp = Ddp()
    for number in range(1, 250):
        if number - 1 in {*range(1, 11), 100, 200}:  # torch reads its timers at the beginning of the next forward
            ddp.times = {
                "iteration": number - 1, "backward_comm_time": 9_000_000,
                "backward_compute_comm_overlap_time": 2_000_000,
            }  # fmt: skip
        step(gpu, ddp, number)
    device_times.measured.settle()
    assert read().exposed_ms == dict.fromkeys([*range(1, 11), 100, 200], 7.0)


def test_a_job_without_a_gpu_marks_nothing(gpu):
    for number in range(1, 4 * STEPS_ONE_IN):
        ended = ClockStep()
        ended.number = number
        device_times.measured.step_ended(ended)
    assert (gpu.made, clock.on_phase) == (0, None)


# While a CUDA graph is captured nothing of a device is asked or read. torch's classes stand in for a GPU.


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def capture_begin(self, *, fails=False):
        if fails:
            raise RuntimeError("no capture")

    def capture_end(self):
        pass


step_clock.patch_graphs(SimpleNamespace(__name__="torch.cuda.graphs", CUDAGraph=Graph))


class Work:
    """Stands for torch.distributed.Work, and says how often it was asked."""

    def __init__(self, *, completed=True):
        self.completed = completed
        self.asked = 0

    def is_completed(self):
        self.asked += 1
        if isinstance(self.completed, Exception):
            raise self.completed
        return self.completed

    def wait(self):
        return True


@pytest.fixture
def ring(ring, monkeypatch):
    monkeypatch.setattr(here, "main_thread", threading.get_ident())
    yield ring
    calls.settle()


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
    index = ring.begin(calls.kind_of(ring, sys._getframe(), "all_reduce").packed)
    calls.hand_out(work, index)


def test_a_capture_is_over_however_it_ended():
    first, second = Graph(), Graph()
    first.capture_begin()
    second.capture_begin()
    first.capture_end()
    assert step_clock.is_capturing()
    second.capture_end()
    with pytest.raises(RuntimeError, match="no capture"):
        first.capture_begin(fails=True)
    assert not step_clock.is_capturing()


@capturing
def test_no_work_is_asked_while_a_graph_is_captured(ring, captures):
    works_before, work_within = [Work(), Work()], Work()
    for work in works_before:
        hand_out(ring, work)
    asked = [work.asked for work in works_before]
    with captures():
        calls.settle()
        hand_out(ring, work_within)
        assert calls.wrap_wait(Work.wait)(works_before[1])
        assert [work.asked for work in works_before] == asked
        assert work_within.asked == 0
    calls.settle()
    assert all(slot.ended_ns for slot in slots(ring))


@capturing
def test_a_captured_call_ends_at_once(ring, captures):
    work = Work()
    with captures():
        calls.wrap(
            "all_reduce",
            lambda tensor, group, async_op: work,  # noqa: ARG005 - as torch calls them
            "tensor",
        )(torch.ones(1), group=Group(), async_op=True)
    (slot,) = slots(ring)
    assert (slot.op, slot.seq, bool(slot.ended_ns), work.asked) == ("all_reduce", 5, True, 0)


class Group:
    """A process group that counts."""

    group_name = "0"

    def _get_sequence_number_for_group(self):
        return 4


def test_a_work_that_raises_holds_up_no_other(ring):
    aborted, after = Work(completed=RuntimeError("NCCL communicator was aborted")), Work()
    hand_out(ring, aborted)
    hand_out(ring, after)
    calls.settle()
    assert [bool(slot.ended_ns) for slot in slots(ring)] == [True, True]
    assert not [note for note in ring_reading.read_ring_file(ring.path).notes if note["k"] == "defect"]


def test_of_too_many_works_the_oldest_are_followed_and_none_looks_pending_for_ever(ring):
    running = [Work(completed=False) for _ in range(calls.MAX_HANDED_OUT + 2)]
    for work in running:
        hand_out(ring, work)
    assert [bool(slot.ended_ns) for slot in slots(ring)] == [False] * calls.MAX_HANDED_OUT + [True] * 2
    running.clear()
    calls.settle()
    assert all(slot.ended_ns for slot in slots(ring))


def test_results_that_nobody_waits_for_do_not_look_pending_for_ever(tmp_path, monkeypatch):
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RingShape(2**16, 2 * functional.MAX_OUTPUTS), 43, 7)
    monkeypatch.setattr(here, "ring", ring)
    results = [torch.empty(1) for _ in range(functional.MAX_OUTPUTS + 2)]
    operator = functional._Operator("all_reduce", waits=False, arguments=["tensor"])
    try:
        for tensor in [*results, results[-1]]:
            operator.end((ring.begin(bytes(ring_layout.KIND.size)), 0, 0, None, 0), tensor)
        awaited = [functional._outputs.get(tensor.untyped_storage()._cdata) for tensor in results]
    finally:
        functional._outputs.clear()
    ended = [bool(slot.ended_ns) for slot in slots(ring)]
    assert ended == [True] * 2 + [False] * (functional.MAX_OUTPUTS - 1) + [True, False]
    assert awaited == [None, None, *range(3, functional.MAX_OUTPUTS + 2), functional.MAX_OUTPUTS + 3]


@capturing
def test_no_tensor_is_looked_at_and_no_stream_is_asked_while_a_graph_is_captured(monkeypatch, captures):
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: asked.append(1))
    with captures():
        assert not fingerprinting.may_fingerprint()
        assert gradient_checks.is_observed()
        assert not fingerprinting.gpu_is_idle()
    assert not asked


class ReferredTo(SimpleNamespace):
    """A DDP model on a GPU. A plain SimpleNamespace has no weak references."""


def test_no_timer_of_ddp_is_read_that_waits_for_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the recorder writes its failures here
    ddp = ReferredTo(device_type="cuda", device="cuda:0", process_group=Group(), logger=SimpleNamespace())
    steps.model_reduced(ddp, 1, 2)
    assert not steps._pending
    assert list(tmp_path.iterdir()) == []


# What looks at gradients cost a GPU, counted on tensors of "cuda" without data and, with stub streams, on a CPU's.


PARAMETERS = 300
WAITS = ("aten._local_scalar_dense.default", "aten.item.default", "aten.is_nonzero.default", "aten.equal.default")
"""Operations for which the host waits."""
FREE = (
    "prim.device", "aten.detach", "aten.view", "aten.empty", "aten.unbind", "aten.select", "aten.slice", "aten.alias",
    "aten.as_strided", "aten._reshape_alias", "aten.t.",
)  # fmt: skip
"""Operations that launch nothing."""


class Counting(TorchDispatchMode):
    """Counts the operations that reach a device."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))

    def launches(self):
        return sum(count for name, count in self.seen.items() if not name.startswith(FREE))


class Event:
    """Stands for torch.cuda.Event; ``done`` says whether the device has come so far."""

    done = True
    waited = 0

    def record(self, stream=None):
        pass

    def query(self):
        return Event.done

    def synchronize(self):
        Event.waited += 1


@pytest.fixture
def streams(monkeypatch):
    """Events and streams that need no GPU, and pinned memory that is plain."""
    empty = torch.empty

    def unpinned(*size, **named):
        named.pop("pin_memory", None)
        return empty(*size, **named)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: None)
    monkeypatch.setattr(Event, "done", True)
    monkeypatch.setattr(Event, "waited", 0)


@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16", "float32")])
@pytest.mark.usefixtures("streams")
def test_a_look_at_a_bucket_costs_a_few_launches_and_no_wait(dtypes):
    with FakeTensorMode(), Counting() as counted:
        grads = [torch.empty(64, 64, dtype=getattr(torch, dtypes[i % len(dtypes)]), device="cuda")
                 for i in range(PARAMETERS)]  # fmt: skip
        counted.seen.clear()
        Maxima(samples_of(grads))
    assert counted.launches() <= 10, counted.seen
    assert not counted.seen.keys() & set(WAITS)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"])
@pytest.mark.usefixtures("streams")
def test_every_kind_of_gradient_can_be_looked_at_an_empty_one_too(name):
    with FakeTensorMode():
        dtype = getattr(torch, name)
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in ((3, 5), (0,), (), (4, 0))]
        samples = samples_of(tensors)
        Maxima(samples)
    assert all(sample.shape == () and sample.is_cuda for sample in samples)


class OnGpu(Trained):
    """A DDP model whose tensors are said to be on a GPU, and how often its looks reach for one."""

    shape = (2, 4)

    def __init__(self, monkeypatch, ring, layers=6, **options):
        super().__init__(ring, inner=torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)]), **options)
        self.norms, self.items = [], 0
        norm, item = torch._foreach_norm, torch.Tensor.item

        def counted_norm(tensors, *args):
            self.norms.append(len(tensors))
            return norm(tensors, *args)

        def counted_item(tensor):
            self.items += 1
            return item(tensor)

        monkeypatch.setattr(torch, "_foreach_norm", counted_norm)
        monkeypatch.setattr(torch.Tensor, "item", counted_item)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        self.watch = GradientWatch(self.replica, self.model)
        self.norms.clear()


@pytest.fixture
def make(ring, monkeypatch, streams, world):  # noqa: ARG001 - they are needed, not used
    monkeypatch.setattr(gradient_checks, "_noted", {False: 0, True: 0})
    return lambda **options: OnGpu(monkeypatch, ring, **options)


@pytest.mark.parametrize("options", [
    {}, {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    {"gradient_as_bucket_view": True, "find_unused_parameters": True, "bucket_cap_mb": 0.0001},
])  # fmt: skip
def test_a_bad_gradient_is_found_on_a_gpu_without_a_wait(make, options):
    job = make(**options)
    job.spoil(1, 5)
    for number in range(8):
        job.backward()
        job.model.zero_grad()
        if number == 5:
            assert (job.items, Event.waited) == (0, 0)
    assert (job.items, Event.waited) == (0, 2)  # once something was found: whether it has come to the parameters
    (found,) = job.found()
    assert (found.step, found.tensors, found.count, found.of) == (6, ("1.weight",), 1, 12)


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"find_unused_parameters": False}])
def test_gradients_that_ddp_reduces_in_place_are_looked_at_by_bucket(make, options):
    job = make(gradient_as_bucket_view=True, bucket_cap_mb=0.0002, **options)
    for _ in range(12):
        job.norms.clear()
        job.backward()
    assert sum(job.norms) == 12 + len(("input", "loss"))
    assert 3 < len(job.norms) < 8


def test_parameters_that_are_never_used_leave_the_others_in_their_buckets(make):
    job = make(gradient_as_bucket_view=True, find_unused_parameters=True, bucket_cap_mb=0.001)
    job.model.module[2].forward = lambda x: x
    job.backward()
    job.norms.clear()
    job.backward()
    assert sum(job.norms) == 10 + len(("input", "loss"))
    assert len(job.norms) < 6


def test_only_the_last_of_several_backwards_is_looked_at_and_what_others_added_is_found_there(make):
    job = make()
    job.backward()
    job.model.zero_grad()
    looks, bad = [], torch.ones(2, 4)
    bad[0, 0] = NAN
    for x in (bad, None, None):
        job.norms.clear()
        with job.model.no_sync() if len(looks) < 2 else nullcontext():
            job.backward(x)
        looks.append(max(job.norms))
    assert looks == [1, 1, 12]
    (found,) = job.found()
    assert (found.step, found.count, found.note) == (2, 12, "argument 0 of forward holds NaN in 1 of 8 values")


def test_who_never_reduces_by_ddp_is_looked_at_in_every_backward(make):
    job = make()
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    job.backward()
    for _ in range(2):
        job.norms.clear()
        with job.model.no_sync():
            job.backward()
        job.watch.before_step(optimizer)
        optimizer.step()
    assert max(job.norms) == 12


def test_empty_gradients_and_inputs_are_no_defect(make):
    job = make()
    job.model.module[1].register_parameter("empty", torch.nn.Parameter(torch.empty(0)))
    job.backward(torch.ones(0, 4))
    job.backward()
    assert job.found() == ()


@pytest.mark.usefixtures("streams")
def test_a_finite_float64_that_no_float32_can_hold_is_finite():
    maxima = Maxima(samples_of([torch.tensor([1e300], dtype=torch.float64)]))
    assert all(map(math.isfinite, maxima.values()))


def test_a_result_that_has_not_come_is_not_waited_for(make):
    job = make()
    job.spoil(1, 0)
    Event.done = False
    job.backward()
    job.watch.catch_up()
    assert not job.watch.findings.pending
    Event.done = True
    job.watch.catch_up()
    assert job.watch.findings.pending["tensors"] == ["1.weight"]


def taken(shapes, dtype=torch.float32):
    """Return the operations that fingerprints of tensors on a GPU take, without the transfer of what they come to."""
    with FakeTensorMode(allow_non_fake_inputs=True), Counting() as counted:
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        reader = Reader(torch.device("cuda"))
        counted.seen.clear()
        for owner, tensor in enumerate(tensors):
            reader.take(owner, 0, tensor)
        reader.end()
    return counted


@pytest.fixture
def in_order(monkeypatch):
    """A tensor without data has no address; let it be a good one."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _tensor: 0)


@pytest.mark.usefixtures("in_order")
def test_fingerprints_of_small_tensors_share_their_launches_and_large_ones_take_few_however_large():
    large = [(11008, 4096)] * 10  # 1.8 GB: 2.3 million words, in batches of a million
    for shapes, most in (([(32, 16)] * PARAMETERS, 30), ([(1024, 1024)] * 20, 4 * 20 + 30), (large, 4 * 10 + 8 * 10)):
        counted = taken(shapes)
        assert counted.launches() <= most, counted.seen
        assert not counted.seen.keys() & set(WAITS)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "complex64", "complex128", "bool", "int8"]
)
def test_every_kind_of_tensor_can_be_printed_an_empty_one_too(name):
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = getattr(torch, name)
        reader = Reader(torch.device("cuda"))
        for shape in ((3, 5), (0,), (), (300, 301)):
            reader.take(0, 0, _of_known_dtype(torch.empty(shape, dtype=dtype, device="cuda")))
        reader.end()
