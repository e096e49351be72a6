"""What a trial is made of, in one process: batches, losses, models, records and their comparison."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpdoctor.model.consistency import StreamClock, Values, What
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.trial import TrialSettings
from ddpdoctor.probes.consistency.comparing import (
    RunRecord,
    StepRecord,
    TensorDigest,
    buffer_rows,
    compare_runs,
    compare_steps,
    digest_rows,
    merge_reruns,
    parameter_rows,
    state_rows,
)
from ddpdoctor.probes.consistency.session import RankPlace, describe_built, describe_places
from ddpdoctor.probes.consistency.training import (
    CannotJoin,
    Training,
    TrainingSetup,
    TrainingStep,
    build,
    choose_batches,
    join,
    quiet_dropout,
    sample_counts,
    see_model,
)
from ddpdoctor.probes.user_code import leaves

CPU = torch.device("cpu")
SETTINGS = TrialSettings(model="m:f")


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (nn.Linear(5, 2), (8, 5), torch.float32),
        (nn.Conv2d(3, 4, 3), (8, 3, 32, 32), torch.float32),
        (nn.Embedding(11, 4), (8, 16), torch.int64),
    ],
)
def test_a_batch_is_made_up_for_the_first_layer_alike_on_every_process(layer, shape, dtype):
    batches = choose_batches(SETTINGS, nn.Sequential(nn.Identity(), layer, nn.Linear(9, 9)), CPU)
    one, again, other = (batches.get(rank, 2, 1) for rank in (1, 1, 0))
    assert (tuple(one.shape), one.dtype) == (shape, dtype)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_model_of_unknown_input_needs_a_batch():
    with pytest.raises(UserError, match="cannot guess"):
        choose_batches(SETTINGS, nn.LSTM(2, 2), CPU)


def test_batches_are_joined_leaf_by_leaf():
    batches = [{"x": torch.full((n, 2), n), "more": [torch.tensor(3), "text"]} for n in (1, 2)]
    whole = join(batches)
    assert whole["x"].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert whole["more"] == [torch.tensor(3), "text"]
    assert sample_counts(batches) == (1, 2)
    assert [place for place, _ in leaves(whole)] == ["batch['x']", "batch['more'][0]", "batch['more'][1]"]


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "pad them"),
        ([torch.tensor(1), torch.tensor(2)], "one number"),
        ([["a"], ["b"]], "not a tensor"),
        ([[torch.ones(1)], [torch.ones(1)] * 2], "different structures"),
    ],
)
def test_batches_that_do_not_go_together_say_why(batches, said):
    with pytest.raises(CannotJoin, match=said):
        join(batches)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "returned NoneType, not a model"),
        ((nn.Linear(1, 1), "sgd"), "the second is not a torch optimizer"),
        ((nn.Linear(1, 1), None, 3), "the third is not a function"),
        (nn.Linear(1, 1).requires_grad_(requires_grad=False), "without trainable parameters"),
    ],
)
def test_what_is_no_model_is_reported(made, said):
    with pytest.raises(UserError, match=said):
        build(lambda: made, "m:f", CPU)


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


def test_the_first_difference_of_each_kind_is_kept_with_the_last_point_of_equality():
    steps = [[record(rank, 1) for rank in range(3)]]
    steps.append([record(rank, 2, **({"PARAMETER_b": "11"} if rank == 1 else {})) for rank in range(3)])
    steps.append([record(rank, 3, **({"PARAMETER_a": "11"} if rank == 1 else {})) for rank in range(3)])
    (stream,) = compare_steps(steps)
    (difference,) = stream.differences
    assert (stream.clock, stream.compared, stream.last_number) == (StreamClock.STEP, 3, 3)
    assert (difference.what, difference.number, difference.last_equal) == (What.PARAMETER, 2, 1)
    assert (difference.splits[0].row.name, difference.splits[0].sides) == ("b", ((0, 2), (1,)))
    assert (difference.differing, difference.of) == (1, 2)


def test_an_absent_gradient_is_a_side():
    steps = [[record(0, 1), record(1, 1, GRADIENT_a="")]]
    (difference,) = compare_steps(steps)[0].differences
    assert difference.splits[0].absent_on == (1,)


def test_buffers_are_compared_where_all_ranks_were_sent_them():
    own = [
        (TensorDigest(what=What.BUFFER, name="mean", shape=(2,), dtype="float32", digest=text),)
        for text in ("00", "11")
    ]
    steps = [[record(rank, 1, synced=own[rank]) for rank in range(2)], [record(0, 2, synced=own[0]), record(1, 2)]]
    stream = next(one for one in compare_steps(steps) if one.clock is StreamClock.SYNC)
    assert (stream.compared, stream.differences[0].what) == (1, What.BUFFER)


def test_a_second_run_is_compared_tensor_by_tensor_and_the_batch_comes_first():
    first = RunRecord(built=(), records=(record(1, 1), record(1, 2)))
    other = RunRecord(built=(), records=(record(1, 1), record(1, 2, GRADIENT_b="11")))
    found = compare_runs(first, other, 1)
    assert (found.step, found.what, found.name, found.ranks, found.differing) == (2, What.GRADIENT, "b", (1,), 1)
    assert compare_runs(first, first, 1).step is None
    changed = RunRecord(built=(), records=(replace(record(1, 1), batch="y"),))
    assert compare_runs(first, changed, 1).name == "the batch"
    later = replace(found, step=3, ranks=(0,))
    assert merge_reruns([later, found, compare_runs(first, first, 2)]) == found


def test_places_are_reported_together_and_the_silent_are_named():
    places = [RankPlace(rank=n, phase="step 2", line="", waits=True) for n in (0, 2)]
    places.append(RankPlace(rank=1, phase="step 2", line="m.py:3 in f", waits=False))
    assert describe_places(places, 4) == [
        "ranks 0 and 2 in step 2",
        "rank 1 in step 2, at m.py:3 in f",
        "no message came from rank 3",
    ]


def test_parameters_without_values_yet_are_left_out():
    assert digest_rows(parameter_rows(nn.LazyLinear(3))) == ()
    assert describe_built([(), ()]) == ""


def test_parameters_that_were_built_unlike_are_named():
    built = [
        digest_rows([*parameter_rows(module), *buffer_rows(module)]) for module in (nn.Linear(1, 1), nn.Linear(1, 1))
    ]

    assert describe_built(built) == (
        "built with one seed, 2 parameters had other values on other ranks, as weight (rank 0 and rank 1); DDP's "
        "constructor gave all rank 0's"
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
    setup = TrainingSetup(
        settings=settings, rank=0, world_size=1, device=CPU, built=built, steps=TrainingStep("", None),
        batches=choose_batches(settings, built.module, CPU), mark=lambda _: None,
    )  # fmt: skip
    training = Training(setup)
    return [training.compute(step) for step in (1, 2)]


@pytest.mark.parametrize(
    ("output", "settings", "hint"),
    [
        (first_only, SETTINGS, UNUSED),
        (lambda model, x: model.first(x[:, :3]) + model.second(x), SETTINGS, BATCH),
        (lambda model, x: model.first(x.long()), SETTINGS, BATCH),
        (with_mask, SETTINGS, BATCH),
        (lambda model, x: model.first({"images": x}["pixels"]), SETTINGS, BATCH),
        (lambda model, x: model.first(x.pixels), SETTINGS, BATCH),
        (lambda model, _: nn.functional.embedding(torch.tensor([9]), model.first.weight), SETTINGS, BATCH),
        (first_only, replace(SETTINGS, batch=f"{__name__}:make_batch"), ""),
        (lambda *_: Path("/no/such/file").read_text(), SETTINGS, ""),
        (lambda *_: torch.empty(2**60), SETTINGS, ""),
        (fail, SETTINGS, ""),
    ],
)
@pytest.mark.usefixtures("group")
def test_an_error_of_a_step_names_the_option_that_helps(output, settings, hint):
    with pytest.raises(UserError, match="the model failed in step") as error:
        train(output, settings)
    assert (hint in error.value.help) if hint else ("--" not in error.value.help)
    assert "at " in error.value.help  # the line stays


@pytest.mark.usefixtures("group")
def test_with_unused_parameters_allowed_such_a_model_trains():
    assert len(train(first_only, replace(SETTINGS, unused=True))) == 2
