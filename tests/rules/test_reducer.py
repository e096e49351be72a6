"""Backwards that left gradients out: the parameters are named, the ranks and the remedy, and no drift beside it."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.progress import judge_job as judge
from ddpdoctor.model.consistency import Consistency, What
from ddpdoctor.model.facts import ModelSeen
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.reducer import Fault, ReducerSaid
from tests.rules.asking import judge_about
from tests.rules.consistency.build import difference, everywhere, stream

from .build import AUTOGRAD, LONG_AGO, S, backwards, crashed, error, failed_in, in_backward, in_call, job, line, phase

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
        (
            raised(0, said("a.weight", what=Fault.TWICE), op="backward"),
            raised(1, said("a.weight", what=Fault.TWICE)),
        ),
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
