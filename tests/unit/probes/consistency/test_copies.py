"""Copies of a model alone and in ranks, and errors of gradients."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import ddpdoctor
from ddpdoctor.model.consistency import ConsistencyError, ConsistencyResult, TensorDifference
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.trial import OneProcess, TrialSettings
from ddpdoctor.probes.consistency.reference import (
    Gradients,
    Question,
    ReferenceProcess,
    compare_gradients,
    take_gradients,
)
from ddpdoctor.probes.consistency.replicas import find_differences
from ddpdoctor.rules.consistency.reference import LIMIT, explain, ratio

# The one process that computes the reference: what it keeps does not stay on the GPU, and it has a time limit.


def test_gradients_are_kept_on_the_host():
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(1000, 1000, device="cuda", dtype=torch.bfloat16))
        weight.grad = torch.empty(1000, 1000, device="cuda", dtype=torch.bfloat16)
        module = torch.nn.ParameterDict({"weight": weight})
        kept = take_gradients(module)

    assert {(one.device.type, one.dtype) for one in kept.values()} == {("cpu", torch.float64)}


def test_what_is_kept_is_a_copy():
    module = torch.nn.Linear(2, 2, dtype=torch.float64)
    module.weight.grad = torch.ones_like(module.weight)
    kept = take_gradients(module)
    module.weight.grad.zero_()

    assert list(kept) == ["weight"]
    assert bool((kept["weight"] == 1).all())


def test_a_reference_that_takes_too_long_is_reported_as_such():
    process = ReferenceProcess(TrialSettings(model="m:f", limit_s=0.001), 1, torch.device("cpu"), 0)
    try:
        with pytest.raises(UserError) as error:
            process.ask(1, ())
    finally:
        process.close()

    assert error.value.message == "the process that computes the reference did not answer within 0.006 s"


# Gradients of a real model in one process: what is right is within rounding, what is wrong is not.


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


# The public call, in a world of one and over tables of several ranks.


def row(value, *, what="parameter", name="w", part="", shown="float32[2]"):
    return [what, name, part, f"{value} {shown}", shown]


def test_without_a_process_group_all_that_was_named_is_counted_and_equal():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result = ddpdoctor.check_consistency(model, optimizer)
    assert (result.equal, result.ranks, result.differences, result.left_out) == (True, (0,), (), ())
    assert bool(result)
    # Four parameters and gradients, three buffers, and the optimizer's settings.
    assert result.compared > 11
    assert ddpdoctor.check_consistency(model, gradients=False, buffers=False).compared == 4
    assert ddpdoctor.check_consistency(model, gradients=False, allow=["0.*"]).compared == 5


def test_the_random_state_and_the_graph_are_left_alone():
    model = nn.Linear(2, 2)
    before, versions = torch.get_rng_state(), [one._version for one in model.parameters()]
    ddpdoctor.check_consistency(model)
    assert torch.equal(before, torch.get_rng_state())
    assert versions == [one._version for one in model.parameters()]


def test_shards_are_left_out_and_said_to_be():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    result = ddpdoctor.check_consistency(model, gradients=False)
    assert (result.compared, result.left_out) == (
        0,
        ("2 tensors of which a rank has a shard or no data, or sparse and not added up",),
    )


def test_the_minority_is_named_and_kinds_are_in_their_order():
    tables = {rank: [row("a", what="gradient"), row("a"), row("lr", what="optimizer setting")] for rank in range(3)}
    tables[2] = [row("b", what="gradient"), row("b"), row("other", what="optimizer setting")]
    setting, first, second = find_differences(tables)
    assert (setting.what, first.what, second.what) == ("optimizer setting", "parameter", "gradient")
    assert (first.sides, first.ranks) == (((0, 1), (2,)), (2,))
    assert str(first) == "parameter w: ranks 0 and 1 against rank 2"


@pytest.mark.parametrize(
    ("tables", "ranks", "text"),
    [
        ({0: [row("a")], 1: [row("b")]}, (0, 1), "parameter w: rank 0 against rank 1"),
        ({0: [row("a")], 1: []}, (0, 1), "parameter w: rank 0: float32[2], rank 1: none"),
        (
            {0: [row("a")], 1: [row("a", shown="float32[3]")], 2: [row("a")]},
            (1,),
            "parameter w: ranks 0 and 2: float32[2], rank 1: float32[3]",
        ),
        (
            {n: [row(n, what="optimizer state", part="exp_avg")] for n in (4, 7)},
            (4, 7),
            "optimizer state w (exp_avg): rank 4 against rank 7",
        ),
    ],
)  # fmt: skip
def test_a_difference_says_who_has_what(tables, ranks, text):
    (one,) = find_differences(tables)
    assert (one.ranks, str(one)) == (ranks, text)


def test_equal_tables_differ_in_nothing():
    assert find_differences({0: [row("a")], 1: [row("a")]}) == ()


def test_an_error_names_the_first_few_and_keeps_all():
    sides = {"sides": ((0,), (1,)), "values": ("", "")}
    each = [TensorDifference(what="parameter", name=f"w{n}", part="", **sides) for n in range(7)]
    result = ConsistencyResult(equal=False, differences=tuple(each), ranks=(0, 1), compared=7, left_out=())
    error = ConsistencyError(result)
    assert str(error).startswith("replicas differ on ranks 0 and 1: parameter w0: rank 0 against rank 1; ")
    assert str(error).endswith("; and 2 more")
    assert error.result is result


@pytest.mark.parametrize("model", [None, {"weight": torch.ones(1)}])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(TypeError, match=r"compares a torch.nn.Module, but got "):
        ddpdoctor.check_consistency(model)
