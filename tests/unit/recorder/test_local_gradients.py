"""One DDP model whose local gradients are looked at: what is found, when it counts as used, what is written."""

import sys
from itertools import product
from types import SimpleNamespace

import pytest

from ddpdoctor.collect.recorded import read_nonfinite
from ddpdoctor.model.consistency import Origin
from ddpdoctor.recorder import gradient_checks
from ddpdoctor.recorder.gradient_checks import LONG_ROW, MAX_NOTED, has_finite_sum, pieces_of, tensors_in
from ddpdoctor.recorder.gradients import Backward, GradientWatch
from ddpdoctor.recorder.storage import ring_reading

torch = pytest.importorskip("torch")
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("world")


class Trained:
    """A model of three layers, watched as under the hooks, and what its ring holds in the end."""

    shape = (4, 8)

    def __init__(self, ring, *, inner=None, **options):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8) for _ in range(3)]
        self.model = torch.nn.parallel.DistributedDataParallel(inner or torch.nn.Sequential(*layers), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.replica = type("Counted", (), {"reductions": 0, "number": 1, "group": "0"})()
        self.watch = GradientWatch(self.replica, self.model)
        self._ring = ring

    def backward(self, x=None, factor=1.0, *, scaled=False):
        x = torch.ones(self.shape) if x is None else x
        self.watch.begin_forward(self.model, ((x,), {}))
        out = self.model(x)
        loss = out.square().mean() * factor
        running = Backward((loss,), sys._getframe(), scaled)
        out.register_hook(lambda _: self.watch.begin_backward(running))
        loss.backward()
        self.watch.end_backward()
        self.replica.reductions += self.model.require_backward_grad_sync

    def step(self):
        self.watch.before_step(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def spoil(self, layer, when):
        """Let a gradient of one layer be bad in the backward after so many reductions."""
        weight = self.model.module[layer].weight
        weight.register_hook(lambda grad: grad * (NAN if self.replica.reductions == when else 1))

    def found(self):
        self.watch.end()
        notes = ring_reading.read_ring_file(self._ring.path).notes
        assert not [note for note in notes if note["k"] == "defect"]
        return read_nonfinite([*notes, {"k": "gradients"}])


@pytest.fixture
def make(ring, monkeypatch):
    monkeypatch.setattr(gradient_checks, "_noted", {False: 0, True: 0})
    return lambda **options: Trained(ring, **options)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64"])
def test_one_bad_value_is_seen_wherever_it_is(dtype):
    for bad, shape in product((NAN, INF, -INF), ((1,), (3, 5), (100, 101), (70_000,))):
        tensor = torch.full(shape, 0.5).to(getattr(torch, dtype))
        tensor = tensor.t() if len(shape) == 2 else tensor
        tensors = [torch.full((7,), 0.5), torch.full((60_000,), 0.25), tensor, torch.empty(0)]
        assert has_finite_sum(pieces_of(tensors))
        tensor[..., -1:] = bad
        assert not has_finite_sum(pieces_of(tensors)), (bad, shape)


def test_many_large_halves_have_a_finite_sum():
    assert has_finite_sum([[torch.full((20_000,), 60_000.0, dtype=torch.float16)]])


def test_tensors_are_found_in_nests_and_named():
    nest = {"x": [torch.ones(1), torch.ones(1, dtype=torch.long)], "more": SimpleNamespace(mask=torch.ones(2))}
    assert [name for name, _ in tensors_in(nest, "batch")] == ["batch['x'][0]", "batch['more']['mask']"]
    endless: list = []
    endless.append(endless)
    assert tensors_in(endless, "batch") == []


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}])
def test_a_parameter_is_named_with_its_step(make, options):
    job = make(**options)
    job.spoil(1, 4)
    for _ in range(5):
        job.backward()
        job.step()
    (found,) = job.found()
    assert (found.step, found.tensors, found.count, found.of) == (5, ("1.weight",), 1, 6)
    assert (found.origin, found.is_nan, found.used, found.times) == (Origin.GRADIENT, True, True, 1)
    assert found.where.function == "backward"


def test_what_was_first_is_reported(make):
    job = make()
    bad = torch.ones(4, 8)
    bad[0, :3] = NAN
    job.backward(bad)
    job.optimizer.zero_grad()
    job.backward(factor=INF)
    job.optimizer.zero_grad()
    job.backward()
    job.model.module[0].bias.data[2] = INF
    job.backward()
    job.step()
    by_input, by_loss, by_parameter = job.found()
    assert (by_input.origin, by_input.note) == (Origin.INPUT, "argument 0 of forward holds NaN in 3 of 32 values")
    assert (by_loss.origin, by_loss.note) == (Origin.LOSS, "the loss was inf")
    assert (by_parameter.origin, by_parameter.used) == (Origin.PARAMETER, True)
    assert (by_input.used, by_loss.used) == (False, False)


def test_an_input_that_is_inf_on_purpose_is_not_to_blame(make):
    job = make(inner=torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Linear(8, 8)))
    job.model.module[1].bias.register_hook(lambda grad: grad * NAN)
    job.backward(torch.full((4, 8), -INF))
    assert job.found()[0].origin is Origin.GRADIENT


@pytest.mark.parametrize("mended", [False, True])
def test_parameters_that_are_ruined_show_that_gradients_were_used_and_mended_ones_were_not(make, mended):
    job = make()
    job.backward(factor=NAN)
    for parameter in job.model.parameters():
        torch.nan_to_num_(parameter.grad) if mended else parameter.data.sub_(0.1 * parameter.grad)
    if mended:
        job.step()
        job.backward()
    assert [found.used for found in job.found()] == [not mended]


def test_a_step_that_its_optimizer_skips_by_itself_uses_nothing(make):
    job = make()
    job.backward(factor=INF, scaled=True)
    job.optimizer.found_inf = torch.ones(())
    job.watch.before_step(job.optimizer)
    assert job.found() == ()


def test_overflow_under_a_scaler_is_reported_only_when_it_does_not_end(make):
    job = make()
    for _ in range(LONG_ROW - 1):
        job.backward(factor=INF, scaled=True)
        job.optimizer.zero_grad()
    job.backward(scaled=True)
    assert job.found() == ()
    for _ in range(LONG_ROW + 3):
        job.optimizer.zero_grad()
        job.backward(factor=INF, scaled=True)
    (found,) = job.found()
    assert (found.scaled, found.used, found.in_a_row) == (True, False, LONG_ROW)


def test_nan_from_the_input_is_reported_under_a_scaler_too(make):
    job = make()
    job.backward(torch.full((4, 8), NAN), scaled=True)
    assert [(found.scaled, found.origin) for found in job.found()] == [(True, Origin.INPUT)]


def test_what_is_noted_is_little(make):
    job = make()
    for after in (job.optimizer.zero_grad, job.step):
        for _ in range(3 * MAX_NOTED):
            job.backward(factor=NAN)
            after()
    assert [one.used for one in job.found()] == [False] * MAX_NOTED + [True] * MAX_NOTED


def test_huge_gradients_are_finite(make):
    job = make()
    for layer in job.model.module:
        layer.weight.register_hook(lambda grad: torch.full_like(grad, 3e38))
    job.backward()
    assert job.found() == ()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_numbers_stay_the_same(make, options):
    job, alone = make(**options), make(**options)
    alone.watch.off = True
    for _ in range(3):
        x = torch.randn(4, 8)
        for one in (job, alone):
            one.backward(x.clone())
            one.step()
    pairs = zip(job.model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_backward_inside_another_has_gradients_looked_at_as_they_come(make):
    job = make()
    job.model.module[2].bias.register_hook(lambda grad: grad * (NAN if job.replica.reductions == 1 else 1))
    running = Backward((), sys._getframe(), scaled=False)
    out = job.model(torch.ones(4, 8))
    out.register_hook(lambda _: job.watch.begin_backward(running) or job.watch.spoil())
    out.sum().backward()
    job.watch.end_backward()
    job.replica.reductions += 1
    job.backward()
    assert [(found.step, found.tensors) for found in job.found()] == [(2, ("2.bias",))]


def test_a_parameter_that_gets_no_gradient_is_passed_over(make):
    job = make(find_unused_parameters=True)
    job.model.module.register_parameter("late", torch.nn.Parameter(torch.ones(3)))
    job.watch = GradientWatch(job.replica, job.model)
    job.backward(factor=NAN)
    assert job.found()[0].count == 6
