"""The public call, in a world of one and over tables of several ranks."""

import pytest
import torch
from torch import nn

import ddpdoctor
from ddpdoctor.model.replicas import ConsistencyError, ConsistencyResult, TensorDifference
from ddpdoctor.probes.consistency.replicas import find_differences


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
