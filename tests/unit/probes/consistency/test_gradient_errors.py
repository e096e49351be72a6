"""Gradients of a real model in one process: what is right is within rounding, what is wrong is not."""

import pytest
import torch
from torch import nn

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.trial import OneProcess
from ddpdoctor.probes.consistency.gradient_errors import Gradients, compare_gradients
from ddpdoctor.probes.consistency.reference_process import Question
from ddpdoctor.rules.consistency.reference_causes import LIMIT, explain, ratio

RANKS = 4
QUESTION = Question(step=1, path="", batches=(), losses=(1.0,) * RANKS)


def gradients(model, loss, x, y):
    model.zero_grad()
    loss(model(x), y).backward()
    return {name: one.grad.detach().double().clone() for name, one in model.named_parameters()}


def mean(parts):
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}


def compared(model, loss, batches, ddp, dtype=torch.float32):
    """Compare ``ddp(parts)``, of gradients in the model's precision, with one process."""
    whole = [torch.cat(part) for part in zip(*batches, strict=True)]
    made = {}
    for kind in (dtype, torch.float64):
        model = model.to(kind)
        cast = [(x.to(kind), y.to(kind) if y.is_floating_point() else y) for x, y in batches]
        x = whole[0].to(kind)
        y = whole[1].to(kind) if whole[1].is_floating_point() else whole[1]
        made[kind] = Gradients(
            whole=gradients(model, loss, x, y), parts=tuple(gradients(model, loss, *one) for one in cast)
        )
        reordered = gradients(model, loss, x.flip(0), y.flip(0))
    held = {name: one.to(dtype) for name, one in ddp(list(made[dtype].parts)).items()}
    return compare_gradients(
        question=QUESTION, ddp=held, plain=made[dtype], double=made[torch.float64],
        other_numbers=made[torch.float64].whole, reordered=reordered, still=None, samples=(8,) * RANKS,
        part_losses=(1.0,) * RANKS,
    )  # fmt: skip


def right(step):
    return all(ratio(one.whole, one.rounding) <= LIMIT for one in step.tensors)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1))


@pytest.fixture
def batches():
    return [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(RANKS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_the_mean_over_ranks_is_that_of_one_process_up_to_rounding(model, batches, dtype, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert right(compared(model, nn.functional.mse_loss, batches, mean, dtype))


def test_a_bias_in_front_of_a_norm_over_the_batch_has_no_gradient_and_no_alarm(batches):
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(16, 32), nn.Softmax(dim=1), nn.Linear(32, 1))
    assert right(compared(shared, nn.functional.mse_loss, batches, mean))


def test_gradients_that_are_nothing_but_rounding_excuse_no_other(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, affine=False))
    step = compared(model, lambda made, _: (made**3).mean(), batches, lambda parts: parts[0])
    weight = next(one for one in step.tensors if one.name == "0.weight")
    assert ratio(weight.whole, weight.rounding) > LIMIT


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda parts: {name: RANKS * one for name, one in mean(parts).items()}, "4 times (the world size)"),
        (lambda parts: {name: one / RANKS for name, one in mean(parts).items()}, "1/4 of"),
        (lambda parts: parts[0], "rank 0's own batch"),
        (lambda parts: {**mean(parts), "3.bias": parts[0]["3.bias"]}, "as 3.bias"),
        (lambda parts: {name: one * 1.0001 for name, one in mean(parts).items()}, "1.0001 times the mean"),
    ],
)
def test_what_is_wrong_with_the_reduction_is_found_and_reported(model, batches, wrong, said):
    step = compared(model, nn.functional.mse_loss, batches, wrong)
    assert not right(step)
    assert said in explain(OneProcess(), step).summary


def test_a_sum_over_samples_is_reported(model, batches):
    step = compared(model, lambda x, y: nn.functional.mse_loss(x, y, reduction="sum"), batches, mean)
    assert not right(step)
    assert "sum over samples" in explain(OneProcess(), step).summary
    assert step.weights == pytest.approx((1.0,) * RANKS)


def test_ranks_with_different_numbers_of_samples_are_recognized_by_their_weights(model):
    batches = [(torch.randn(n, 16), torch.randn(n, 1)) for n in (2, 4, 8, 2)]
    step = compared(model, nn.functional.mse_loss, batches, mean)
    assert "mean of means" in explain(OneProcess(), step).summary
    assert step.weights == pytest.approx((1 / 8, 1 / 4, 1 / 2, 1 / 8))


def test_a_loss_that_joins_samples_is_not_explained(model, batches):
    step = compared(model, lambda x, _: x.softmax(dim=0).pow(2).sum(), batches, mean)
    assert not right(step)
    assert explain(OneProcess(), step).confidence is not Confidence.HIGH
