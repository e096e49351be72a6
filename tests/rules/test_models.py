"""Models that DDP was given: the first difference, who has it, and when it is the cause."""

from dataclasses import replace

from ddpdoctor.model.consistency import Consistency, What
from ddpdoctor.model.facts import Fault, ModelSeen, ReducerSaid, TensorSeen
from tests.golden import table
from tests.rules import build
from tests.rules.build import AUTOGRAD, LONG_AGO, S, backwards, crashed, error, job, judge_about, line, phase
from tests.rules.consistency.build import difference, everywhere, stream


def tensor(name, shape=(4, 4), dtype="float32", *, grad=True, buffer=False):
    return TensorSeen(name=name, shape=shape, dtype=dtype, requires_grad=grad, is_buffer=buffer)


def model(*tensors, name="0", site=10, count=None):
    return ModelSeen(
        group=name, digest=str(hash(tensors)), count=len(tensors) if count is None else count, tensors=tensors,
        site=line(site),
    )  # fmt: skip


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


GRADIENTS = difference(What.GRADIENT, 1, None)


def drift(*ranks, waits=("aux.weight",)):
    seen = stream(GRADIENTS, now=everywhere(2, 1, unfinished=waits))
    made = replace(job(*ranks, ended=True), consistency=Consistency(check_every=50, streams=(seen,)))
    return judge_about("consistency", made)


def given(*, finds):
    return {"models": (ModelSeen(group="0", digest="d", count=6, tensors=(), site=line(9), finds_unused=finds),)}


test_rows = table("models", "ddpdoctor.diagnose.job", vars(build), globals(), head=build.sureness)
