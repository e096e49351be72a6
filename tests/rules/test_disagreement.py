"""Who departs: extra, missing and shifted calls, beside what DDP's C++ takes, as the records of real runs have it."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import TensorSeen
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.progress.calls import expected_next
from tests.rules.build import (
    AUTOGRAD,
    C10D,
    LOCK,
    LONG_AGO,
    S,
    call,
    ended,
    failed_in,
    group,
    in_user,
    job,
    killed,
    line,
    phase,
    rank,
    sample,
    stack,
)


class Script:
    """Writes the records of one rank, one statement of its script after the other."""

    def __init__(self, number, world, name="0"):
        self.number, self.world, self.name = number, world, name
        self.calls = []
        self.begun = 0

    def collective(self, site, op="all_reduce", **more):
        self.begun += 1
        self._add(call(op, self.begun, site, group=self.name, **more))
        return self

    def phase(self, op, site, takes):
        self._add(phase(op, site, group="" if op == "new_group" else self.name, begun=self.begun))
        self.begun += takes
        return self

    def build(self, site=10):
        return self.phase("ddp_init", site, 3)

    def step(self, site=13, buffers=0, buckets=1):
        return self.phase("ddp_forward", site, buffers).phase("backward", site + 1, buckets)

    def steps(self, count, **more):
        for _ in range(count):
            self.step(**more)
        return self

    def _add(self, made):
        index = len(self.calls) + 1
        self.calls.append(_at(made, index, open_=False))

    def waits(self, **more):
        """Return the rank, which waits in its last call."""
        last = self.calls[-1]
        inner = AUTOGRAD if last.op == "backward" else C10D
        fields = {
            "recent_calls": tuple(self.calls[:-1]), "open_calls": (_at(last, last.index, open_=True),),
            "groups": (group(self.begun, self.world, self.name),), "samples": (sample(stack(last.site, inner)),),
        }  # fmt: skip
        return rank(self.number, self.world, **{**fields, **more})


def _at(made, index, *, open_):
    return replace(made, index=index, ended_ns=None if open_ else LONG_AGO + index, started_ns=LONG_AGO + index - 1)


def scripts(world):
    return [Script(n, world) for n in range(world)]


def one_differs(world, odd, common, departing, usual):
    """Return a job whose ranks run ``common``, and then ``departing`` on one rank and ``usual`` on the others."""
    found = scripts(world)
    for script in found:
        common(script)
        (departing if script.number == odd else usual)(script)
    return job(*[script.waits() for script in found])


def trained(script):
    script.build().steps(12)


def validated(script):
    script.build()
    for _ in range(2):
        script.steps(10)
        for _ in range(3):
            script.collective(30)
    script.steps(5)


def logged(script):
    script.build()
    for _ in range(5):
        script.step().collective(16)


def alternating(script):
    for _ in range(5):
        script.collective(11).collective(12, "all_gather")


DEPARTURES = {
    "an extra call": (trained, lambda s: s.collective(16, shape=()), lambda s: s.step(), 16),
    "an extra call on the very first step": (
        lambda s: s.build().step(),
        lambda s: s.collective(16, "barrier"),
        lambda s: s.phase("ddp_forward", 13, 1),
        16,
    ),
    "an extra call in the third epoch": (validated, lambda s: s.collective(16), lambda s: s.step(), 16),
    "a missing call": (lambda s: (logged(s), s.step()), lambda s: s.step(), lambda s: s.collective(16), 14),
    "fewer batches": (trained, lambda s: s.collective(20, "barrier"), lambda s: s.step(), 20),
    "a skipped backward, its next forward sends buffers": (
        lambda s: s.build().steps(12, buffers=1).phase("ddp_forward", 13, 1),
        lambda s: s.phase("ddp_forward", 13, 1),
        lambda s: s.phase("backward", 14, 1),
        13,
    ),
    "two calls in the other order": (
        alternating,
        lambda s: s.collective(21, "all_gather"),
        lambda s: s.collective(11),
        21,
    ),
    "an object instead of a tensor": (
        trained,
        lambda s: s.collective(16, "broadcast", api="broadcast_object_list", dtype="torch.int64", shape=(1,)),
        lambda s: s.step(),
        16,
    ),
    "a group that the others do not make": (trained, lambda s: s.phase("new_group", 16, 0), lambda s: s.step(), 16),
    "a monitored barrier": (trained, lambda s: s.collective(16, "monitored_barrier"), lambda s: s.step(), 16),
}


@pytest.mark.parametrize(("world", "odd"), [(2, 0), (2, 1), (3, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("name", DEPARTURES)
def test_the_rank_that_departs_is_blamed(name, world, odd):
    common, departing, usual, where = DEPARTURES[name]
    found = judge(one_differs(world, odd, common, departing, usual))
    assert [(f.kind, list(f.ranks), [p.line for p in f.where]) for f in found.findings] == [
        ("mismatch", [odd], [where])
    ]
    assert found.certain
    assert found.findings[0].confidence is (Confidence.MEDIUM if world == 2 else Confidence.HIGH)


@pytest.mark.parametrize(
    ("usual", "odd", "reported"),
    [
        ({"op": "broadcast", "peer": 0}, {"op": "broadcast", "peer": 1}, ("from rank 0", "from rank 1")),
        ({"op": "reduce", "peer": 0}, {"op": "reduce", "peer": 2}, ("to rank 0", "to rank 2")),
        ({"redop": "SUM"}, {"redop": "MAX"}, (" with MAX",)),
        ({"dtype": "torch.float32"}, {"dtype": "torch.float64"}, ("float32[", "float64[")),
        ({"op": "all_gather", "dtype": "torch.float32"}, {"op": "all_gather", "dtype": "torch.int64"}, ("int64[",)),
    ],
)
def test_root_reduction_and_dtype_have_to_agree_and_are_reported(usual, odd, reported):
    found = judge(
        one_differs(3, 1, alternating, lambda s: s.collective(31, **odd), lambda s: s.collective(31, **usual))
    )
    assert [(f.kind, f.ranks) for f in found.findings] == [("mismatch", (1,))]
    assert all(words in found.findings[0].summary for words in reported)
    fix = "the same dtype on all ranks" if usual.get("dtype") != odd.get("dtype") else "the same root"
    assert fix in found.findings[0].fix


def test_the_default_root_and_reduction_are_the_same_as_written_out():
    found = judge(
        one_differs(
            2,
            1,
            alternating,
            lambda s: s.collective(31, "reduce", peer=0, redop="SUM"),
            lambda s: s.collective(31, "reduce"),
        )
    )
    assert [f.kind for f in found.findings] == ["transport"]


TRAINER = "/usr/lib/python3.11/site-packages/transformers/trainer.py"
LOOP, SAVES = line(1660, "_loop", TRAINER), line(1676, "_loop", TRAINER)
WITHIN = (line(44), replace(LOOP, user=False))
STEPS, ENDS = (replace(line(9, name, TRAINER), user=False) for name in ("training_step", "_finalize"))


HALF, FULL = {"dtype": "torch.bfloat16"}, {"dtype": "torch.float32"}
FINISHED = {
    "one rank's dtype": ((FULL, HALF, FULL), 0, (1,)),
    "no majority": ((FULL, HALF), 0, (0, 1)),
    "the same dtype": ((HALF, HALF, HALF), 0, None),
    "other shapes too": ((FULL, {**HALF, "shape": (3,)}, FULL), 0, None),
    "a job that failed": ((FULL, HALF, FULL), 1, None),
}


@pytest.mark.parametrize("name", FINISHED)
def test_a_dtype_that_differed_in_a_finished_job_is_found(name):
    kinds, status, blamed = FINISHED[name]
    found = [Script(n, len(kinds)) for n in range(len(kinds))]
    for script in found:
        script.collective(31, "broadcast", peer=0, **kinds[script.number])
        for step in range(8):  # both dtypes at one line, on all ranks
            script.collective(12, **(HALF if step % 2 else FULL))
    ranks = [ended(s.number, s.world, recent_calls=tuple(s.calls), groups=(group(9, s.world),)) for s in found]
    checks = judge(job(*ranks, ended=True, launcher_status=status))
    assert [f.ranks for f in checks.findings if f.kind == "mismatch"] == ([] if blamed is None else [blamed])
    if blamed == (1,):
        (finding,) = checks.findings
        assert "rank 1 called broadcast of bfloat16[16] from rank 0 (train.py:31), but ranks 0 and 2" in finding.summary
        assert ".to(torch.float32); look where rank 1 creates, loads or casts it" in finding.fix


def differs_as(odd, usual, odd_stack=(), usual_stack=(), **more):
    """Three ranks whose last call differs on rank 1, with what each was inside of, and the verdict."""
    found = scripts(3)
    for script in found:
        alternating(script)
        (odd if script.number == 1 else usual)(script)
    stacks = [odd_stack if n == 1 else usual_stack for n in range(3)]
    ranks = [
        script.waits(**more, **({"samples": (sample(stack(*frames)),)} if frames else {}))
        for script, frames in zip(found, stacks, strict=True)
    ]
    return judge(job(*ranks)).findings[0]


def test_a_rank_that_left_the_loop_inside_a_library_s_call_is_placed_there():
    found = differs_as(
        lambda s: s.collective(44, "all_gather"),
        lambda s: s.collective(44, "barrier", dtype=None, shape=None),
        (line(44), replace(SAVES, user=False), ENDS, C10D),
        (*WITHIN, STEPS, C10D),
    )
    assert (found.kind, found.ranks) == ("mismatch", (1,))
    assert "inside that line, rank 1 is in _finalize (trainer.py:1676)" in found.evidence
    assert "inside that line, ranks 0 and 2 are in training_step (trainer.py:1660)" in found.evidence
    assert "leave its loop in the same step" in found.fix


def test_gradients_that_hooks_reduce_are_named():
    rows = [("encoder.weight", (8, 4)), ("speaker.bias", (5,)), ("ctc.bias", (30,)), ("head.bias", (30,))]
    seen = tuple(
        TensorSeen(name=name, shape=shape, dtype="float32", requires_grad=True, is_buffer=False) for name, shape in rows
    )
    inside = (line(46), AUTOGRAD, line(16, "reduce_gradient"), C10D)
    site = line(16, "reduce_gradient")
    odd, usual = (lambda s: s.collective(site, shape=(30,))), (lambda s: s.collective(site, shape=(5,)))
    found = differs_as(odd, usual, inside, inside, parameters=seen)
    assert (found.kind, found.ranks) == ("mismatch", (1,))
    assert "ranks 0 and 2 reduce the gradient of speaker.bias in a hook during backward" in found.evidence
    assert "rank 1 reduces a gradient of shape [30] (ctc.bias or head.bias) in a hook during backward" in found.evidence
    assert "a hook runs only for parameters that the loss reaches" in found.fix
    outside = differs_as(odd, usual, (line(46), site, C10D), (line(46), site, C10D), parameters=seen)
    assert "hook" not in " ".join((*outside.evidence, outside.fix))
    function = replace(line(300, "apply"), file=AUTOGRAD.file.replace("graph.py", "function.py"), user=False)
    own = (line(46), AUTOGRAD, function, site, C10D)
    assert "hook" not in differs_as(odd, usual, own, own, parameters=seen).fix


@pytest.mark.parametrize(("world", "odd"), [(2, 0), (2, 1), (3, 1)])
def test_an_equal_call_that_shifted_the_later_ones_is_found_where_it_was_made(world, odd):
    found = scripts(world)
    for script in found:
        for step in range(30):
            script.collective(12)
            if step == 10 and script.number == odd:
                script.collective(14)
        if script.number != odd:
            script.collective(15, "barrier")
    verdict = judge(job(*[script.waits() for script in found])).findings[0]
    assert (verdict.kind, verdict.ranks, [p.line for p in verdict.where]) == ("mismatch", (odd,), [14])
    assert "called all_reduce" in verdict.summary


def test_lines_that_always_belonged_together_are_no_departure():
    found = scripts(2)
    for script in found:
        for _ in range(10):
            script.collective(20 + script.number, "broadcast")
            script.collective(30)
        script.collective(*((40, "reduce") if script.number == 0 else (30,)))
    verdict = judge(job(*[script.waits() for script in found])).findings[0]
    assert (verdict.ranks, [p.line for p in verdict.where]) == ((0,), [40])


def test_without_a_history_both_of_two_are_named():
    found = [Script(0, 2).collective(6, "reduce"), Script(1, 2).collective(20)]
    verdict = judge(job(*[script.waits() for script in found])).findings[0]
    assert (verdict.ranks, verdict.confidence) == ((0, 1), Confidence.LOW)
    assert "ranks 0 and 1 have made no progress for 60 s" in verdict.evidence


def test_how_many_batches_each_rank_had_is_reported():
    found = one_differs(2, 1, trained, lambda s: s.collective(20, "barrier"), lambda s: s.step())
    ranks = [replace(found.ranks[0], steps=16, batches=16), replace(found.ranks[1], steps=12, batches=12)]
    verdict = judge(job(*ranks)).findings[0]
    assert "rank 1 completed 12 optimizer steps and 12 batches" in verdict.evidence
    assert "DistributedSampler" in verdict.fix


def test_ddp_in_a_group_of_its_own_is_compared_there():
    found = [Script(n, 4, name="1" if n < 2 else "2") for n in range(4)]
    for script in found:
        script.build().steps(5)
    found[3].collective(16, "barrier")
    found[2].step()
    own = [{"groups": (group(s.begun, 4, s.name, (0, 1) if s.number < 2 else (2, 3)), group(4, 4))} for s in found]
    fresh = {"world": 4, "last_progress_ns": LONG_AGO + 59 * S}
    idle = [in_user(n, recent_calls=tuple(found[n].calls), **own[n], **fresh) for n in (0, 1)]
    verdict = judge(job(*idle, *[found[n].waits(**own[n]) for n in (2, 3)])).findings[0]
    assert (verdict.kind, verdict.ranks, [p.line for p in verdict.where]) == ("mismatch", (3,), [16])
    assert "the group of ranks 2 and 3" in verdict.evidence[0]


def test_the_caller_is_named_where_an_innocent_receiver_was_aborted():
    found = scripts(3)
    for script in found:
        trained(script)
    found[0].collective(16, shape=())
    victim = found[1].step().waits(groups=())
    lost = killed(
        1, "SIGABRT", recent_calls=victim.recent_calls, open_calls=victim.open_calls, samples=(), main_ended_ns=None,
        groups=(group(found[1].begun - 1, 3),),
    )  # fmt: skip
    reported = replace(lost, groups=tuple(replace(g, backend="") for g in lost.groups))
    broken = failed_in(2, "backward", site=14, groups=(group(16, 3),), at=LONG_AGO + 2 * S)
    broken = replace(broken, recent_calls=_failing(found[2].step().calls))
    report = judge(job(found[0].waits(), reported, broken, ended=True, stopping_since_ns=LONG_AGO + 3 * S))
    errors = [f for f in report.findings if f.severity is Severity.ERROR]
    assert [(f.kind, f.ranks, [p.line for p in f.where]) for f in errors] == [("mismatch", (0,), [16])]


def _failing(calls):
    return (*calls[:-1], replace(calls[-1], failed=True))


def test_a_collective_of_a_thread_counts_while_the_main_thread_joins_it():
    found = scripts(3)
    for script in found:
        alternating(script)
        script.collective(14 if script.number == 2 else 11, shape=(3,) if script.number == 2 else (16,))
    aside = found[2].waits()
    pending = (replace(aside.open_calls[0], thread_is_main=False),)
    joins = replace(
        aside, open_calls=pending, samples=(sample(stack(line(18), LOCK), stack(line(14), C10D, main=False)),)
    )
    report = judge(job(found[0].waits(), found[1].waits(), joins))
    assert [(f.kind, f.ranks, [p.line for p in f.where]) for f in report.findings] == [("mismatch", (2,), [14])]


def test_a_rank_that_ended_after_a_wrong_call_is_no_early_exit():
    found = scripts(3)
    for script in found:
        alternating(script)
        script.collective(20, "reduce") if script.number == 1 else script.collective(11)
    gone = ended(1, recent_calls=tuple(found[1].calls), groups=(group(found[1].begun, 3),), ended_ns=LONG_AGO + 5 * S)
    errors = [f for f in judge(job(found[0].waits(), gone, found[2].waits())).findings if f.severity is Severity.ERROR]
    assert [(f.kind, f.ranks) for f in errors] == [("mismatch", (1,))]


def test_calls_of_hooks_in_a_backward_that_failed_are_not_taken_for_the_backward():
    found = scripts(2)
    for script in found:
        script.build(10)
        for step in range(4):
            script.phase("backward", 14, 0)
            for site in (11, 11) if (script.number, step) == (1, 2) else (11, 11, 11, 11):
                script.collective(line(site, "reduce"))
    gone = ended(1, world=2, recent_calls=tuple(found[1].calls), groups=(group(found[1].begun, 2),))
    *before, backward, first, second, third, _ = found[0].calls
    end = {"ended_ns": LONG_AGO + S, "failed": True}
    error = failed_in(0, "all_reduce", 1, site=11).raised
    inside = (replace(backward, **end), first, second, replace(third, **end))
    failed = failed_in(0, "all_reduce", 1, world=2, groups=(group(third.seq, 2),))
    broken = replace(failed, recent_calls=(*before, *inside), raised=error)
    errors = [f for f in judge(job(broken, gone, ended=True)).findings if f.severity is Severity.ERROR]
    assert [(f.kind, f.ranks) for f in errors] == [("early-exit", (1,))]


def test_what_history_foretells_has_shares():
    epoch = ["step"] * 10 + ["metric"]
    assert expected_next([*epoch, *["step"] * 10]) == {"metric": 1.0}
    shares = expected_next([*epoch, *["step"] * 4])
    assert shares["step"] > shares["metric"]
    assert expected_next(["a", "b"]) == {}


def test_who_has_not_come_to_new_group_is_waited_for():
    found = scripts(3)
    for script in found:
        alternating(script)
    found[0].phase("new_group", 16, 0)
    found[2].collective(11)
    sleeps = in_user(1, recent_calls=tuple(found[1].calls), groups=(group(found[1].begun, 3),))
    errors = judge(job(found[0].waits(), sleeps, found[2].waits())).findings
    assert [(f.kind, f.ranks) for f in errors] == [("stuck", (1,))]


def test_shapes_of_a_gather_are_a_reason_where_nothing_else_is():
    sides = (lambda s: s.collective(31, "all_gather", shape=(7,))), (lambda s: s.collective(31, "all_gather"))
    found = judge(one_differs(3, 2, alternating, *sides))
    assert [(f.kind, f.ranks) for f in found.findings] == [("mismatch", (2,))]


def test_splits_of_an_exchange_are_none():
    op = "all_to_all_single"
    sides = (lambda s: s.collective(31, op, shape=(7,))), (lambda s: s.collective(31, op))
    found = judge(one_differs(3, 2, alternating, *sides))
    assert [f.kind for f in found.findings] == ["transport"]
