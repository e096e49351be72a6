"""Models that DDP was given: the first difference, who has it, and when it is the cause."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.progress import judge_job as judge
from ddpdoctor.model.facts import ModelSeen, TensorSeen
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.verdict import pick_verdict

from .build import LONG_AGO, S, failed_in, group, in_backward, in_user, job, line, moving, phase, rank


def tensor(name, shape=(4, 4), dtype="float32", *, grad=True, buffer=False):
    return TensorSeen(name=name, shape=shape, dtype=dtype, requires_grad=grad, is_buffer=buffer)


def model(*tensors, name="0", site=10, count=None):
    return ModelSeen(
        group=name, digest=str(hash(tensors)), count=len(tensors) if count is None else count, tensors=tensors,
        site=line(site),
    )  # fmt: skip


MASK = tensor("mask", buffer=True, grad=False)
USUAL = (tensor("a.weight"), tensor("a.bias", (4,)), tensor("b.weight"), MASK)
ODD = {
    "a shape": ((USUAL[0], tensor("a.bias", (5,)), *USUAL[2:]), "a.bias"),
    "a dtype": ((tensor("a.weight", dtype="float64"), *USUAL[1:]), "a.weight"),
    "a frozen layer": ((*USUAL[:2], tensor("b.weight", grad=False), MASK), "b.weight"),
    "another order": ((USUAL[2], *USUAL[:2], MASK), "a.weight"),
    "one more in the middle": ((USUAL[0], tensor("extra.weight"), *USUAL[1:]), "extra.weight"),
    "one fewer": ((USUAL[0], *USUAL[2:]), "a.bias"),
    "one more at the end, before the buffers": ((*USUAL[:3], tensor("c.weight"), MASK), "c.weight"),
    "a buffer": ((*USUAL[:3], tensor("mask", (5,), buffer=True, grad=False)), "mask"),
    "a lazy layer": ((tensor("a.weight", None), *USUAL[1:]), "a.weight"),
    "another name": ((tensor("enc.weight"), *USUAL[1:]), "enc.weight"),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("name", ODD)
def test_the_odd_model_is_the_cause_of_a_hang_in_backward(name, odd):
    tensors, first = ODD[name]
    ranks = [in_backward(n, models=(model(*(tensors if n == odd else USUAL)),)) for n in range(3)]
    found = judge(job(*ranks))
    verdict = pick_verdict(found.findings)
    assert (verdict.code, verdict.ranks, verdict.tensor, verdict.confidence) == (
        "DD506", (odd,), first, Confidence.HIGH,
    )  # fmt: skip
    assert [(p.rank, p.line) for p in verdict.where] == [(odd, 10)]
    assert [f.code for f in found.findings if f.severity is Severity.ERROR] == ["DD506"]
    assert found.certain
    assert verdict.summary
    assert verdict.fix


def test_rank_0_is_blamed_where_all_others_raise_in_the_constructor():
    waits = rank(0, open_calls=(phase("ddp_init", 10, begun=0),), groups=(group(1, 3),), models=(model(*USUAL[1:]),))
    raised = [failed_in(n, "ddp_init", site=10, message="DDP expects same model", at=LONG_AGO + n * S) for n in (1, 2)]
    others = [replace(r, models=(model(*USUAL),)) for r in raised]
    found = judge(job(waits, *others, stopping_since_ns=LONG_AGO + 4 * S))
    assert [(f.code, f.ranks) for f in found.findings if f.severity is Severity.ERROR] == [("DD506", (0,))]


def test_of_two_both_are_named():
    ranks = [in_backward(n, world=2, models=(model(*(USUAL if n else USUAL[1:])),)) for n in range(2)]
    verdict = judge(job(*ranks)).findings[0]
    assert (verdict.code, verdict.ranks, verdict.confidence) == ("DD506", (0, 1), Confidence.MEDIUM)


def test_rows_that_found_no_room_leave_the_name_open():
    cut = [model(*USUAL[:2], count=4), model(*USUAL[:2], count=4), model(*USUAL[:2], count=5)]
    cut[2] = replace(cut[2], digest="other")
    verdict = judge(job(*[in_backward(n, models=(cut[n],)) for n in range(3)])).findings[0]
    assert (verdict.code, verdict.ranks, verdict.tensor) == ("DD506", (2,), None)
    assert "rank 2 has 5 parameters and buffers" in verdict.evidence


def test_a_job_that_goes_on_with_different_models_is_reported_and_not_stopped():
    ranks = [moving(in_user(n, models=(model(*(USUAL[1:] if n == 1 else USUAL)),))) for n in range(3)]
    found = judge(job(*ranks))
    assert [(f.code, f.ranks) for f in found.findings] == [("DD506", (1,))]
    assert not found.certain


def test_a_rank_that_sleeps_is_the_cause_whatever_its_model():
    sleeps = in_user(1, models=(model(*USUAL[1:]),))
    found = judge(job(in_backward(0, models=(model(*USUAL),)), sleeps, in_backward(2, models=(model(*USUAL),))))
    assert pick_verdict(found.findings).kind == "stuck"


G, D = model(tensor("g.weight")), model(tensor("d.weight"), site=11)
ALIKE = {
    "two models in the same order": [(G, D), (G, D), (G, D)],
    "one rank has not come to the second": [(G, D), (G,), (G, D)],
    "no rank uses DDP": [(), (), ()],
    "made at other lines": [(model(*USUAL, site=10 + n),) for n in range(3)],
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_models_are_silent(name):
    ranks = [moving(in_user(n, models=models)) for n, models in enumerate(ALIKE[name])]
    assert judge(job(*ranks)).findings == ()


def test_models_of_different_groups_may_differ():
    ranks = []
    for n in range(4):
        members = (0, 1) if n < 2 else (2, 3)
        name = "1" if n < 2 else "2"
        mine = model(*(USUAL if n < 2 else USUAL[1:]), name=name)
        ranks.append(moving(in_user(n, world=4, groups=(group(6, 4), group(3, 4, name, members)), models=(mine,))))
    assert judge(job(*ranks)).findings == ()
