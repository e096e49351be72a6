"""What a trial is made of, in one process: batches, losses, models, records and their comparison."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import ddpdoctor
from ddpdoctor.model.consistency import ConsistencyError, ConsistencyResult, TensorDifference, Values, What
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.trial import OneProcess, TrialSettings
from ddpdoctor.probes.consistency.comparing import (
    RunRecord,
    StepRecord,
    TensorDigest,
    compare_runs,
    compare_steps,
    digest_rows,
    find_differences,
    merge_reruns,
    model_rows,
    state_rows,
)
from ddpdoctor.probes.consistency.reference import (
    Gradients,
    Question,
    ReferenceProcess,
    compare_gradients,
    take_gradients,
)
from ddpdoctor.probes.consistency.session import describe_built
from ddpdoctor.probes.consistency.training import (
    CannotJoin,
    Training,
    TrainingStep,
    build,
    choose_batches,
    join,
    quiet_dropout,
    sample_counts,
    see_model,
)
from ddpdoctor.probes.loading import leaves
from ddpdoctor.rules.consistency.reference import LIMIT, explain, ratio
from tests.golden import Cases, table

CASES = Cases(__name__)
test_kept = CASES.test()
CPU = torch.device("cpu")
SETTINGS = TrialSettings(model="m:f")


def test_batches_are_joined_leaf_by_leaf():
    batches = [{"x": torch.full((n, 2), n), "more": [torch.tensor(3), "text"]} for n in (1, 2)]
    whole = join(batches)
    assert whole["x"].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert whole["more"] == [torch.tensor(3), "text"]
    assert sample_counts(batches) == (1, 2)
    assert [place for place, _ in leaves(whole)] == ["batch['x']", "batch['more'][0]", "batch['more'][1]"]


def test_a_model_alone_gets_an_optimizer_and_its_tensors_are_seen_in_order():
    built = build(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "m:f", CPU)
    assert isinstance(built.optimizer, torch.optim.SGD)
    seen = see_model(built.module, "0")
    assert [one.name for one in seen.tensors][:2] == ["0.weight", "0.bias"]
    assert sum(one.is_buffer for one in seen.tensors) == 3
    other = see_model(build(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "m:f", CPU).module, "0")
    assert seen.digest == other.digest


def test_dropout_of_layers_is_turned_off():
    model = nn.Sequential(nn.Dropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.1), nn.Dropout(0.0))
    assert quiet_dropout(model) == 2
    assert quiet_dropout(model) == 0


def test_a_loss_is_taken_from_where_there_is_one():
    model, x = nn.Linear(2, 2), torch.ones(4, 2)
    steps = TrainingStep("", nn.functional.mse_loss)
    assert steps.run(model, (x, x), "step 1") == pytest.approx(nn.functional.mse_loss(model(x), x).item())
    alone = TrainingStep("", None)
    assert alone.run(model, x, "step 1") == pytest.approx(model(x).square().mean().item())
    assert "because no loss was given" in alone.words
    with pytest.raises(UserError, match="not \\(input, target\\)") as reported:
        steps.run(model, x, "step 1")
    assert reported.value.status == 4


def test_a_step_that_has_called_backward_itself_is_not_made_to_do_so_again():
    model = nn.Linear(2, 1)

    def step(model, batch):
        loss = model(batch).sum()
        loss.backward()
        return loss

    steps = TrainingStep("", None)
    steps._loss = step
    steps.run(model, torch.ones(3, 2), "step 1")
    assert model.weight.grad.tolist() == [[3.0, 3.0]]


def test_numbers_of_an_optimizer_are_printed_as_its_tensors_are():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    seen = digest_rows(state_rows(model, optimizer))
    assert {(one.name, one.part) for one in seen} >= {("weight", "exp_avg"), ("bias", "step")}
    assert all(one.digest for one in seen)


def record(rank, step, synced=None, **values):
    tensors = tuple(
        TensorDigest(what=what, name=name, shape=(2,), dtype="float32", digest=values.get(f"{what.name}_{name}", "00"))
        for what in (What.GRADIENT, What.PARAMETER)
        for name in ("a", "b")
    )
    reported = Values(rank=rank, steps=step, reductions=step, forwards=1, unreduced_forwards=0, random=f"r{rank}")
    return StepRecord(step=step, tensors=tensors, synced=synced, values=reported, loss=1.0, batch="x")


@CASES
def steps_and_runs_that_are_compared():
    """The first difference of each kind is kept, with the last point of equality; an absent gradient is a side."""
    others = ({}, {"PARAMETER_b": "11"}, {"PARAMETER_a": "11"})
    steps = [
        [record(rank, n, **(other if rank == 1 else {})) for rank in range(3)] for n, other in enumerate(others, 1)
    ]
    own = [
        (TensorDigest(what=What.BUFFER, name="mean", shape=(2,), dtype="float32", digest=text),)
        for text in ("00", "11")
    ]
    synced = [[record(rank, 1, synced=own[rank]) for rank in range(2)], [record(0, 2, synced=own[0]), record(1, 2)]]
    first = RunRecord(built=(), records=(record(1, 1), record(1, 2)))
    other = RunRecord(built=(), records=(record(1, 1), record(1, 2, GRADIENT_b="11")))
    changed = RunRecord(built=(), records=(replace(record(1, 1), batch="y"),))
    found, equal = compare_runs(first, other, 1), compare_runs(first, first, 2)
    return {
        "parameters": compare_steps(steps), "a gradient": compare_steps([[record(0, 1), record(1, 1, GRADIENT_a="")]]),
        "buffers, where all ranks were sent them": compare_steps(synced), "a second run": found, "an equal run": equal,
        "the batch comes first": compare_runs(first, changed, 1),
        "runs of all ranks": merge_reruns([replace(found, step=3, ranks=(0,)), found, equal]),
    }  # fmt: skip


def test_parameters_without_values_yet_have_no_digest_and_no_shape():
    assert digest_rows(model_rows(nn.LazyLinear(3), What.PARAMETER)) == ()
    assert [tensor.shape for tensor in see_model(nn.LazyLinear(3), "0").tensors] == [None, None]
    assert describe_built([(), ()]) == ""


def test_parameters_that_were_built_unlike_are_named():
    built = [digest_rows(model_rows(nn.Linear(1, 1), What.PARAMETER, What.BUFFER)) for _ in range(2)]
    assert describe_built(built) == (
        "built with one seed, 2 parameters differed between ranks, such as weight (rank 0 and rank 1); DDP's "
        "constructor gave all ranks those of rank 0"
    )


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group over Gloo in which this process is the only rank."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Takes(nn.Module):
    """A model whose output is computed from itself and its inputs. Its first layer takes eight numbers."""

    def __init__(self, output):
        super().__init__()
        self.first, self.second, self.output = nn.Linear(8, 4), nn.Linear(8, 4), output

    def forward(self, *inputs):
        return self.output(self, *inputs)


def make_batch(*_):
    return torch.randn(3, 5)


def fail(*_):
    raise RuntimeError("no license")


def first_only(model, batch):
    return model.first(batch)


def with_mask(model, batch, mask):
    return model.first(batch * mask)


UNUSED = "pass --find-unused-parameters"
BATCH = "The batch is float32[8, 8], made up for first (Linear). If the model takes something else, give yours: --batch"


def train(output, settings):
    built = build(lambda: Takes(output), "m:f", CPU)
    training = Training(settings, built, 0, 1, CPU, lambda _: None)
    training.wrap()
    return [training.compute(step) for step in (1, 2)]


FAILING = [
    (first_only, SETTINGS, UNUSED), (lambda model, x: model.first(x.long()), SETTINGS, BATCH),
    (lambda model, x: model.first(x[:, :3]) + model.second(x), SETTINGS, BATCH),
    (with_mask, SETTINGS, BATCH), (lambda model, x: model.first(x.pixels), SETTINGS, BATCH),
    (lambda model, x: model.first({"images": x}["pixels"]), SETTINGS, BATCH),
    (lambda model, _: nn.functional.embedding(torch.tensor([9]), model.first.weight), SETTINGS, BATCH),
    (first_only, replace(SETTINGS, batch=f"{__name__}:make_batch"), ""), (fail, SETTINGS, ""),
    (lambda *_: Path("/no/such/file").read_text(), SETTINGS, ""), (lambda *_: torch.empty(2**60), SETTINGS, ""),
]  # fmt: skip


@pytest.mark.parametrize(("output", "settings", "hint"), FAILING)
@pytest.mark.usefixtures("group")
def test_an_error_of_a_step_names_the_option_that_helps(output, settings, hint):
    with pytest.raises(UserError, match="the model failed in step") as error:
        train(output, settings)
    assert (hint in error.value.help) if hint else ("--" not in error.value.help)
    assert "at " in error.value.help  # the line stays


@pytest.mark.usefixtures("group")
def test_with_unused_parameters_allowed_such_a_model_trains():
    assert len(train(first_only, replace(SETTINGS, unused=True))) == 2


# Copies of a model alone and in ranks, and errors of gradients.


# The one process that computes the reference: what it keeps does not stay on the GPU, and it has a time limit.


def test_gradients_are_kept_on_the_host():
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(1000, 1000, device="cuda", dtype=torch.bfloat16))
        weight.grad = torch.empty(1000, 1000, device="cuda", dtype=torch.bfloat16)
        module = torch.nn.ParameterDict({"weight": weight})
        kept = take_gradients(module, torch.float64)
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


MSE = nn.functional.mse_loss
REDUCTIONS = {
    "4 times (the world size)": (MSE, lambda parts: {name: RANKS * one for name, one in mean(parts).items()}),
    "1/4 of": (MSE, lambda parts: {name: one / RANKS for name, one in mean(parts).items()}),
    "rank 0's own batch": (MSE, lambda parts: parts[0]),
    "as 3.bias": (MSE, lambda parts: {**mean(parts), "3.bias": parts[0]["3.bias"]}),
    "1.0001 times the mean": (MSE, lambda parts: {name: one * 1.0001 for name, one in mean(parts).items()}),
    "sum over samples": (lambda x, y: MSE(x, y, reduction="sum"), mean),
}


@pytest.mark.parametrize("said", REDUCTIONS)
def test_what_is_wrong_with_the_reduction_is_found_and_reported(model, batches, said):
    loss, wrong = REDUCTIONS[said]
    step = compared(model, loss, batches, wrong)
    assert not right(step)
    assert said in explain(OneProcess(), step).summary
    assert wrong is not mean or step.weights == pytest.approx((1.0,) * RANKS)


def test_ranks_with_different_numbers_of_samples_are_recognized_by_their_weights(model):
    batches = [(torch.randn(n, 16), torch.randn(n, 1)) for n in (2, 4, 8, 2)]
    step = compared(model, MSE, batches, mean)
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
        ("2 tensors with only a shard or no data on a rank, or sparse and uncoalesced",),
    )


def tables_of(*names, last):
    """Tables of three ranks, of which the last has another value."""
    return {rank: [row(last if rank == 2 else "a", what=what) for what in names] for rank in range(3)}


def unlike(tables):
    """Return who has what in tables of ranks."""
    return [[str(one), one] for one in find_differences(tables)]


def test_an_error_names_the_first_few_and_keeps_all():
    sides = {"sides": ((0,), (1,)), "values": ("", "")}
    each = [TensorDifference(what="parameter", name=f"w{n}", part="", **sides) for n in range(7)]
    result = ConsistencyResult(equal=False, differences=tuple(each), ranks=(0, 1), compared=7, left_out=())
    error = ConsistencyError(result)
    assert str(error).startswith("replicas differ on ranks 0 and 1: parameter w0: rank 0 against rank 1; ")
    assert str(error).endswith("; and 2 more")
    assert error.result is result


def refused(function, *given):
    """Return how a function refuses what it is given."""
    with pytest.raises((UserError, CannotJoin, TypeError)) as error:
        function(*given)
    return f"{type(error.value).__name__}: {error.value}"


def made_up(layer):
    """Return the shape and type of a batch that is made up for a model, the same again and another on another rank."""
    batches = choose_batches(SETTINGS, nn.Sequential(nn.Identity(), layer, nn.Linear(9, 9)), CPU)
    one, again, other = (batches.get(rank, 2, 1) for rank in (1, 1, 0))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    return f"{one.dtype} {tuple(one.shape)}"


test_rows = table("trial_parts", "ddpdoctor.probes.consistency.session", globals())
