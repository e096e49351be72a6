"""Who departs: extra, missing and shifted calls, beside what DDP's C++ takes, as the records of real runs have it."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Life, TensorSeen
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.majority import Voice, compare, describe, voices_of
from ddpdoctor.rules.progress.calls import expected_next
from ddpdoctor.rules.progress.job_state import build_job_state
from ddpdoctor.rules.progress.transport import find_targets
from tests.rules.build import (
    AUTOGRAD,
    C10D,
    LOCK,
    LONG_AGO,
    S,
    call,
    crashed,
    ended,
    failed_in,
    group,
    in_call,
    in_init,
    in_user,
    job,
    killed,
    line,
    model_of,
    moving,
    phase,
    rank,
    sample,
    stack,
)
from tests.rules.environment.build import node, process


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


# Who differs from the majority, and how that is said.


def voices(*values, by_rank=False):
    return [Voice(host=f"node{i // 2 if by_rank else i}", ranks=(i,), value=value) for i, value in enumerate(values)]


@pytest.mark.parametrize("values", [(), ("2.13",), ("2.13", "2.13"), ("2.13", None, "2.13"), (None, None)])
def test_those_who_agree(values):
    assert compare(voices(*values)) is None


def test_one_differs_from_fifteen():
    split = compare(voices("2.13.0", "2.13.0", "2.13.0", "2.11.0", *["2.13.0"] * 12))

    assert (split.hosts, split.ranks, split.confidence) == (("node3",), (3,), Confidence.HIGH)
    assert describe(split, "torch") == "torch 2.11.0 on node3, 2.13.0 on 15 others"


def test_several_minorities_the_smallest_first():
    split = compare(voices("b", "b", "c", *["a"] * 5))

    assert split.majority.value == "a"
    assert split.hosts == ("node2", "node0", "node1")
    assert describe(split, "kernel") == "kernel c on node2, b on node0 and node1, a on 5 others"


@pytest.mark.parametrize("values", [("a", "b"), ("a", "b", "a", "b"), ("a", "b", "c"), ("a", "a", "b", "c")])
def test_without_a_majority_all_sides_are_named_and_nobody_is_surely_to_blame(values):
    split = compare(voices(*values))

    assert (split.majority, split.confidence) == (None, Confidence.LOW)
    assert set(split.hosts) == {f"node{i}" for i in range(len(values))}


def test_two_hosts():
    assert describe(compare(voices("580.1", "570.2")), "driver") == "driver 580.1 on node0, 570.2 on node1"


def test_who_does_not_know_has_no_voice():
    split = compare(voices("a", None, None, None, "b", "b"))

    assert (split.majority.value, split.hosts) == ("b", ("node0",))
    assert describe(split, "x") == "x a on node0, b on 2 others"


def test_ranks_by_their_numbers():
    split = compare(voices("Tree", "Ring", "Tree", "Tree", by_rank=True))

    said = describe(split, "NCCL_ALGO", by_rank=True, sign="=")
    assert said == "NCCL_ALGO=Ring on rank 1, Tree on 3 others"
    assert split.hosts == ("node0",)


def test_a_majority_of_one_host_with_several_ranks_is_named():
    split = compare([Voice(host="a", ranks=(n,), value=1 + (n == 2)) for n in range(3)])
    assert describe(split, "x") == "x 2 on a, 1 on a"
    assert describe(split, "x", by_rank=True) == "x 2 on rank 2, 1 on 2 others"


def test_values_in_words():
    split = compare(voices(1, 2, 2))
    assert describe(split, "GPUs:", words=lambda count: f"{count} GB") == "GPUs: 1 GB on node0, 2 GB on 2 others"


@pytest.mark.parametrize(
    ("count", "said"),
    [(1, "n0"), (2, "n0 and n1"), (4, "n0, n1, n2 and n3"), (5, "n0, n1, n2 and 2 more"), (9, "n0, n1, n2 and 6 more")],
)
def test_a_list_of_hosts_stays_short(count, said):
    assert name_list([f"n{i}" for i in range(count)]) == said


def test_one_voice_a_node():
    readings = ((node("a", processes=[process(0), process(1)]), "x"), (node("b", processes=[process(2)]), "yy"))
    assert voices_of(readings, len) == (Voice(host="a", ranks=(0, 1), value=1), Voice(host="b", ranks=(2,), value=2))


# Circles of waits: over groups, point-to-point calls and both; who is on them, and how that is said.


def peer(number, op, other, world, site=20):
    return rank(number, world, open_calls=(call(op, None, site, peer=other),), groups=(group(6, world),))


def inside(number, world, name, seq, groups, op="all_reduce"):
    """A rank that waits in a group; ``groups`` has the members and this rank's counter of each, by name."""
    mine = tuple(group(n, world, g, members) for g, (members, n) in groups.items() if number in members)
    return rank(number, world, open_calls=(call(op, seq, 20 + number, group=name),), groups=mine)


def groups_of(a, b, world=None):
    return {"1": a, "2": b, **({"0": world} if world else {})}


W3, W4 = (0, 1, 2), (0, 1, 2, 3)
CIRCLES = {
    "both receive": ([peer(0, "recv", 1, 2), peer(1, "recv", 0, 2)], [0, 1]),
    "both send": ([peer(0, "send", 1, 2), peer(1, "send", 0, 2)], [0, 1]),
    "a ring of receives": ([peer(n, "recv", (n - 1) % 4, 4) for n in W4], [0, 1, 2, 3]),
    "a ring of three, a fourth waits for one of them": (
        [*[peer(n, "recv", (n - 1) % 3, 4) for n in W3], peer(3, "recv", 0, 4)],
        [0, 1, 2],
    ),
    "two rings": ([peer(n, "recv", n ^ 1, 4) for n in W4], [0, 1, 2, 3]),
    "two groups in opposite order": (
        [
            inside(0, 2, "1", 3, groups_of(((0, 1), 3), ((0, 1), 2))),
            inside(1, 2, "2", 3, groups_of(((0, 1), 2), ((0, 1), 3))),
        ],
        [0, 1],
    ),
    "a pair and the group of all, a third waits with one of them": (
        [
            inside(0, 3, "0", 7, {"0": (W3, 7), "1": ((0, 1), 2)}),
            inside(1, 3, "1", 3, {"0": (W3, 6), "1": ((0, 1), 3)}),
            inside(2, 3, "0", 7, {"0": (W3, 7)}),
        ],
        [0, 1],
    ),
    "three groups, each rank begins with another": (
        [
            inside(0, 3, "1", 1, {"1": ((0, 1), 1), "3": ((0, 2), 0)}),
            inside(1, 3, "2", 1, {"1": ((0, 1), 0), "2": ((1, 2), 1)}),
            inside(2, 3, "3", 1, {"2": ((1, 2), 0), "3": ((0, 2), 1)}),
        ],
        [0, 1, 2],
    ),
    "a receive against a barrier": (
        [
            peer(0, "recv", 1, 3),
            inside(1, 3, "0", 7, {"0": (W3, 7)}, "barrier"),
            inside(2, 3, "0", 7, {"0": (W3, 7)}, "barrier"),
        ],
        [0, 1],
    ),
    "a receive against new_group": (
        [peer(0, "recv", 1, 2), rank(1, 2, open_calls=(phase("new_group", 21),), groups=(group(6, 2),))],
        [0, 1],
    ),
}


@pytest.mark.parametrize("name", CIRCLES)
def test_the_ranks_on_the_circle_are_named_and_no_others(name):
    ranks, blamed = CIRCLES[name]
    found = judge(job(*ranks))
    assert [(f.kind, list(f.ranks), f.confidence) for f in found.findings] == [("deadlock", blamed, Confidence.HIGH)]
    assert found.certain


def test_the_circle_is_reported_in_words():
    summary = judge(job(*CIRCLES["a pair and the group of all, a third waits with one of them"][0])).findings[0].summary
    assert summary == (
        "ranks 0 and 1 are waiting for each other: "
        "rank 0 is waiting in all_reduce of the group of all ranks for rank 1, "
        "which is waiting in all_reduce of the group of ranks 0 and 1 for rank 0"
    )


def test_groups_of_the_same_members_are_distinguished():
    summary = judge(job(*CIRCLES["two groups in opposite order"][0])).findings[0].summary
    assert "the group of all ranks (1)" in summary
    assert "the group of all ranks (2)" in summary


def test_a_long_circle_is_reported_in_short():
    found = judge(job(*[peer(n, "recv", (n - 1) % 40, 40) for n in range(40)])).findings[0]
    assert found.ranks == tuple(range(40))
    assert "through 34 more ranks" in found.summary


def test_a_transfer_of_which_both_halves_have_come_is_reported_and_the_job_goes_on():
    found = judge(job(peer(0, "send", 1, 3), peer(1, "recv", 0, 3), peer(2, "recv", 0, 3)))
    assert [(f.kind, f.ranks, f.confidence) for f in found.findings] == [("deadlock", (0, 1), Confidence.LOW)]
    assert "rank 0 is waiting in send for rank 1, which is waiting in recv for rank 0" in found.findings[0].summary
    assert "tag" in found.findings[0].fix
    assert not found.certain


def test_a_transfer_that_has_only_begun_is_none():
    found = judge(job(moving(peer(0, "send", 1, 2)), moving(peer(1, "recv", 0, 2))))
    assert found.findings == ()


def chain(end):
    """Ranks 0 and 1 wait in a group for 2, that waits in another for 3, which is ``end``."""
    a, b = ((0, 1, 2), 3), ((2, 3), 2)
    first = {"1": a}
    return [
        inside(0, 4, "1", 3, first),
        inside(1, 4, "1", 3, first),
        inside(2, 4, "2", 2, {"1": ((0, 1, 2), 2), "2": b}),
        end,
    ]


OWN = {"groups": (group(1, 4, "2", (2, 3)),)}
ENDS_CIRCLES = {
    "stuck": in_user(3, world=4, **OWN),
    "stopped": in_user(3, world=4, proc_state="T", **OWN),
    "early-exit": ended(3, world=4, **OWN),
    "killed": killed(3, world=4, **OWN),
}


@pytest.mark.parametrize("kind", ENDS_CIRCLES)
def test_a_chain_ends_at_the_rank_that_waits_for_nobody(kind):
    errors = [f for f in judge(job(*chain(ENDS_CIRCLES[kind]))).findings if f.severity is Severity.ERROR]
    assert [(f.kind, f.ranks) for f in errors] == [(kind, (3,))]


def test_a_chain_of_receives_ends_at_the_rank_that_does_not_send():
    ranks = [peer(0, "recv", 1, 3), peer(1, "recv", 2, 3), in_user(2)]
    assert [(f.kind, f.ranks) for f in judge(job(*ranks)).findings] == [("stuck", (2,))]


def test_both_ends_of_two_chains_are_named():
    ranks = [peer(0, "recv", 1, 4), in_user(1, world=4), peer(2, "recv", 3, 4), in_user(3, world=4)]
    assert [(f.kind, f.ranks) for f in judge(job(*ranks)).findings] == [("stuck", (1, 3))]


def test_a_backward_of_a_model_in_another_group_waits_there():
    """The records name the model that ran last; the counters say which group has begun a collective since."""
    both = (model_of("1"), model_of("2"))

    def trains(number, moved):
        calls = (
            phase("ddp_forward", 12, group="1", index=1, open_=False, begun=6),
            phase("ddp_forward", 12, group="2", index=2, open_=False, begun=6),
        )
        pending = phase("backward", 14 + number, group="2", index=3, begun=6)
        counters = tuple(group(7 if name == moved else 6, 2, name) for name in ("1", "2"))
        return rank(number, 2, recent_calls=calls, open_calls=(pending,), groups=counters, models=both)

    found = judge(job(trains(0, "1"), trains(1, "2")))
    assert [(f.kind, f.ranks) for f in found.findings] == [("deadlock", (0, 1))]


# Who waits for whom, rank by rank, as a picture of the waits needs it.


def targets(*ranks, **more):
    return {number: set(whom) for number, whom in find_targets(build_job_state(job(*ranks, **more))).items()}


def in_group(number, name, members, seq, others):
    """A rank that waits in a group of its own, and has come as far as ``others`` say in the other groups."""
    groups = (group(0, 4), group(seq, 4, name, members), *(group(n, 4, other, who) for other, who, n in others))
    pending = call(seq=seq, group=name)
    return replace(
        rank(number, 4), open_calls=(pending,), groups=groups, samples=(sample(stack(line(20), C10D)),)
    )  # fmt: skip


def test_ranks_wait_for_the_one_that_has_not_come():
    assert targets(in_call(0), in_user(1), in_call(2)) == {0: {1}, 2: {1}}


def test_a_rank_in_the_call_before_is_waited_for_and_waits_itself():
    assert targets(in_call(0, seq=8, world=3), in_user(1), in_call(2, seq=7)) == {0: {1, 2}, 2: {1}}


def test_ranks_that_a_crash_threw_out_of_a_call_waited_for_the_crashed_one():
    lost = [failed_in(n, "all_reduce", 7, groups=(group(7, 3),)) for n in (0, 2)]
    assert targets(lost[0], crashed(1, groups=(group(6, 3),)), lost[1], ended=True) == {0: {1}, 2: {1}}


def test_two_groups_in_opposite_order_are_a_circle():
    one, other = ("1", (0, 1)), ("2", (0, 1))
    ranks = (in_group(0, *one, 1, [(*other, 0)]), in_group(1, *other, 1, [(*one, 0)]))
    assert targets(*ranks, world_size=2) == {0: {1}, 1: {0}}


def test_two_receives_are_a_circle():
    ranks = [in_call(n, "recv", None, peer=1 - n, world=2) for n in (0, 1)]
    assert targets(*ranks) == {0: {1}, 1: {0}}


def test_ranks_in_init_wait_for_those_that_never_came():
    assert targets(in_init(0, 4), in_init(1, 4), world_size=4) == {0: {2, 3}, 1: {2, 3}}
    never = rank(1, 2, life=Life.NEVER_STARTED, initialized=False)
    assert targets(in_init(0, 2), never) == {0: {1}}


def test_the_sides_of_a_conflict_wait_for_the_minority_and_without_one_for_each_other():
    assert targets(in_call(0), in_call(1, "broadcast"), in_call(2)) == {0: {1}, 2: {1}}
    assert targets(in_call(0, world=2), in_call(1, "broadcast", world=2)) == {0: {1}, 1: {0}}


def test_nobody_waits_where_all_run():
    assert targets(in_user(0), in_user(1), in_user(2)) == {}
