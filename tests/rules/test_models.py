"""Models that DDP was given: the first difference, who has it, and when it is the cause."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.consistency import Consistency, What
from ddpdoctor.model.facts import Fault, ModelSeen, ReducerSaid, TensorSeen
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.engine import pick_verdict
from tests.rules.build import (
    AUTOGRAD,
    LONG_AGO,
    S,
    backwards,
    crashed,
    error,
    failed_in,
    group,
    in_backward,
    in_call,
    in_user,
    job,
    judge_about,
    line,
    moving,
    phase,
    rank,
)
from tests.rules.consistency.build import difference, everywhere, stream


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


# Backwards that left gradients out: the parameters are named, the ranks and the remedy, and no drift beside it.


DDP = AUTOGRAD.__class__(file="/usr/lib/torch/nn/parallel/distributed.py", line=1800, function="forward", user=False)
TEXT = "Expected to have finished reduction in the prior iteration before starting a new one."


def said(*names, what=Fault.UNFINISHED, **more):
    fields = {"count": len(names), "of": 6, "site": line(31), **more}
    return ReducerSaid(what=what, names=names, **fields)


def raised(number, what, at=LONG_AGO, site=29, op="ddp_forward"):
    failed = phase(op, site, failed=True, index=100, open_=False)
    wrong = error("RuntimeError", TEXT, at, (line(site), DDP), in_call=op, reducer=what)
    return crashed(number, wrong, recent_calls=(*backwards(3), failed), ended_ns=at + S)


def judged(*ranks):
    (found,) = judge(job(*ranks, ended=True, launcher_status=1)).findings
    return found


AUX = said("aux.weight", "aux.bias")
FORMS = {
    "all ranks": (
        (raised(0, AUX), raised(1, AUX)),
        ((0, 1), "left aux.weight, aux.bias (2 of 6 parameters) without a gradient", "forward did not use them"),
    ),
    "one rank, the other waits for it in backward": (
        (failed_in(0, "backward", at=LONG_AGO - S), raised(1, AUX)),
        ((1,), "rank 1 raised RuntimeError", "the loss does not depend on their output; on rank 0 it does"),
    ),
    "an output without a part in the loss": (
        (raised(0, replace(AUX, outputs=("extra",))), raised(1, AUX)),
        ((0, 1), "and DDP is waiting for it", "extra in the script depends on them"),
    ),
    "others on another rank": (
        (raised(0, AUX), raised(1, said("head.weight"))),
        ((0, 1), "aux.weight", "rank 1 left out head.weight"),
    ),
    "a static graph": (
        (raised(0, replace(AUX, what=Fault.STATIC)), raised(1, replace(AUX, what=Fault.STATIC))),
        ((0, 1), "with static_graph=True", "forward did not use them"),
    ),
    "twice": (
        (raised(0, said("a.weight", what=Fault.TWICE), op="backward"), raised(1, said("a.weight", what=Fault.TWICE))),
        ((0,), "DDP got the gradient of a.weight (1 of 6 parameters) twice", "outside DDP's forward"),
    ),
    "more than are named": (
        (raised(0, said(*"abcdefgh", count=20, of=40)), raised(1, said(*"abcdefgh", count=20, of=40))),
        ((0, 1), "a, b, c, d, e and 15 more (20 of 40 parameters)", "forward did not use them"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_that_ddp_missed(name):
    ranks, (blamed, summary, evidence) = FORMS[name]
    found = judged(*ranks)
    assert (found.code, found.confidence) == ("DD604", Confidence.HIGH)
    assert set(blamed) <= set(found.ranks)
    assert summary in found.summary
    assert any(evidence in sentence for sentence in found.evidence), found.evidence
    assert "static_graph" in found.fix or "find_unused_parameters=True" in found.fix


def test_the_reduction_that_one_rank_left_out_before_another_collective():
    past = in_call(1, seq=7, world=2, recent=backwards(3), index=100)
    found = judged_running(in_backward(0, 7, 2), replace(past, unfinished=AUX))
    assert (found.code, found.ranks, found.confidence) == ("DD602", (1,), Confidence.HIGH)
    assert "backward on rank 1 (train.py:31) left aux.weight, aux.bias" in found.summary
    assert [place.line for place in found.where] == [31]
    assert judged_running(in_backward(0, 7, 2), past).where[0].line != 31


def judged_running(*ranks):
    return judge(job(*ranks)).findings[0]


GRADIENTS = difference(What.GRADIENT, 1, None)


def drift(*ranks, waits=("aux.weight",)):
    seen = stream(GRADIENTS, now=everywhere(2, 1, unfinished=waits))
    made = replace(job(*ranks, ended=True), consistency=Consistency(check_every=50, streams=(seen,)))
    return [(found.code, found.summary) for found in judge_about("consistency", made).findings]


def test_drift_that_follows_from_the_crash_is_no_finding():
    assert drift(raised(0, AUX), raised(1, AUX)) == []


def test_drift_of_an_unfinished_reduction_that_nobody_noticed_says_so():
    ((code, summary),) = drift(crashed(0), crashed(1))
    assert code == "DD503"
    assert "left aux.weight without a gradient" in summary


def test_another_drift_stays_beside_the_crash():
    assert [code for code, _ in drift(raised(0, AUX), raised(1, AUX), waits=())] == ["DD503"]


def given(*, finds):
    return {"models": (ModelSeen(group="0", digest="d", count=6, tensors=(), site=line(9), finds_unused=finds),)}


def test_unused_parameters_are_looked_for_on_one_rank_only():
    failed = replace(failed_in(0, "backward", at=LONG_AGO + S), **given(finds=True))
    found = judged(failed, replace(raised(1, AUX), **given(finds=False)))
    assert found.ranks == (1,)
    assert any("rank 0 passed find_unused_parameters=True to DDP, and rank 1 did not" in e for e in found.evidence)
    assert not any("it did on rank 0" in sentence for sentence in found.evidence)


def test_a_mismatch_by_unequal_options_of_ddp():
    past = replace(in_call(1, seq=7, world=2, recent=backwards(3), index=100), **given(finds=False))
    found = judged_running(replace(in_backward(0, 7, 2), **given(finds=True)), past)
    assert (found.code, "find_unused_parameters" in found.fix) == ("DD602", True)
    same = replace(past, **given(finds=True))
    assert "find_unused_parameters" not in judged_running(replace(in_backward(0, 7, 2), **given(finds=True)), same).fix
