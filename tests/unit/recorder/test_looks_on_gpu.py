"""What looks at gradients cost a GPU, counted on tensors of "cuda" without data and, with stub streams, on a CPU's."""

import math
import sys
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddpdoctor.collect.rank.notes import read_nonfinite
from ddpdoctor.recorder.gradients import findings
from ddpdoctor.recorder.gradients.finite_checks import Maxima, samples_of
from ddpdoctor.recorder.gradients.watch import Backward, GradientWatch
from ddpdoctor.recorder.replicas.fingerprint import Reader
from ddpdoctor.recorder.replicas.tensor_words import _of_known_dtype
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring

NAN, INF = float("nan"), float("inf")
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


class Replica:
    """What the look reads of a model's record."""

    reductions = 0
    number = 1
    group = "0"


class Trained:
    """A DDP model whose tensors are said to be on a GPU, and how often its looks reach for one."""

    def __init__(self, monkeypatch, ring, layers=6, **options):
        self.ring = ring
        self.model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)]), **options
        )
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
        self.replica = Replica()
        self.watch = GradientWatch(self.replica, self.model)
        self.norms.clear()

    def backward(self, x=None):
        x = torch.ones(2, 4) if x is None else x
        self.watch.begin_forward(self.model, ((x,), {}))
        out = self.model(x)
        loss = out.square().mean()
        running = Backward((loss,), sys._getframe(), scaled=False)
        out.register_hook(lambda _: self.watch.begin_backward(running))
        loss.backward()
        self.watch.end_backward()
        if self.model.require_backward_grad_sync:
            self.replica.reductions += 1

    def found(self):
        self.watch.end()
        notes = ring_reading.read_ring_file(self.ring.path).notes
        assert not [note for note in notes if note["k"] == "defect"]
        return read_nonfinite([*notes, {"k": "gradients"}])


@pytest.fixture
def make(tmp_path, monkeypatch, streams, world):  # noqa: ARG001 - they are needed, not used
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    monkeypatch.setattr(here, "ring", ring)
    monkeypatch.setattr(findings, "_noted", {False: 0, True: 0})
    return lambda **options: Trained(monkeypatch, ring, **options)


def spoil(job, layer, when):
    weight = job.model.module[layer].weight
    weight.register_hook(lambda grad: grad * (NAN if job.replica.reductions == when else 1))


@pytest.mark.parametrize("options", [
    {}, {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    {"gradient_as_bucket_view": True, "find_unused_parameters": True, "bucket_cap_mb": 0.0001},
])  # fmt: skip
def test_a_bad_gradient_is_found_on_a_gpu_without_a_wait(make, options):
    job = make(**options)
    spoil(job, 1, 5)
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
    job.model.module[2] = Skipping(job.model.module[2])
    job.backward()
    job.norms.clear()
    job.backward()
    assert sum(job.norms) == 10 + len(("input", "loss"))
    assert len(job.norms) < 6


class Skipping(torch.nn.Module):
    """Holds a layer, and does not use it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x


def test_only_the_last_of_several_backwards_is_looked_at(make):
    job = make()
    job.backward()
    job.model.zero_grad()
    looks = []
    for sync in (False, False, True):
        job.norms.clear()
        with nullcontext() if sync else job.model.no_sync():
            job.backward()
        looks.append(max(job.norms))
    assert looks == [1, 1, 12]


def test_what_was_added_by_a_backward_that_is_passed_over_is_found_at_the_last(make):
    job = make()
    job.backward()
    job.model.zero_grad()
    bad = torch.ones(2, 4)
    bad[0, 0] = NAN
    with job.model.no_sync():
        job.backward(bad)
        job.backward()
    job.backward()
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
        job.watch.step_begins()
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
    spoil(job, 1, 0)
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
def test_fingerprints_of_small_tensors_share_their_launches():
    counted = taken([(32, 16)] * PARAMETERS)
    assert counted.launches() <= 30, counted.seen
    assert not counted.seen.keys() & set(WAITS)


@pytest.mark.usefixtures("in_order")
def test_fingerprints_of_large_tensors_take_few_launches_each_however_large():
    few = taken([(1024, 1024)] * 20)
    assert few.launches() <= 4 * 20 + 30, few.seen
    large = taken([(11008, 4096)] * 20)
    assert large.launches() <= 4 * 20 + 7 * 20, large.seen  # 3.6 GB: 4.5 million words, in batches of a million
    assert not large.seen.keys() & set(WAITS)


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
