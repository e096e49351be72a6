"""A call that one rank makes alone, after the others have passed it and left; and ranks that left too early."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Life, Rank
from ddpdoctor.model.findings import Confidence, Severity
from tests.rules.build import (
    C10D,
    LONG_AGO,
    TORCH,
    S,
    ended,
    error,
    group,
    in_call,
    in_user,
    job,
    line,
    phase,
    rank,
    sample,
    stack,
)
from tests.rules.test_disagreement import Script

DDP = line(1880, "forward", f"{TORCH}/nn/parallel/distributed.py")
DESTROYED = "destroy_process_group"


def trained(number: int, world: int) -> Script:
    """Return the records of a rank that has trained its twelve steps, at lines 13 and 14."""
    return Script(number, world).build().steps(12)


def left(script: Script, *, destroyed_at: int | None = 41, function: str = "main", **more: object) -> Rank:
    """Return a rank whose script has ended, with or without ``destroy_process_group`` at a line of a function."""
    calls = list(script.calls)
    if destroyed_at is not None:
        site = line(destroyed_at, function)
        calls.append(phase(DESTROYED, site, index=len(calls) + 1, open_=False, begun=script.begun))
    fields = {"recent_calls": tuple(calls), "groups": (group(script.begun, script.world),), "main_ended_ns": LONG_AGO}
    return ended(script.number, script.world, **{**fields, **more})


def thrown_out(script: Script, *frames: object) -> Rank:
    """Return a rank whose last call raised, because its peers had closed their connections."""
    last = script.calls[-1]
    raised = error("RuntimeError", "Connection closed by peer", LONG_AGO + S, frames, in_call=last.op)
    return ended(
        script.number, script.world, exit_code=1, raised=(raised,),
        recent_calls=(*script.calls[:-1], replace(last, failed=True)),
        groups=(group(script.begun, script.world),), ended_ns=LONG_AGO + 2 * S,
    )  # fmt: skip


def hooked(script: Script) -> Rank:
    """Return a rank that waits in a callback, called at line 40 of main."""
    frames = (line(40), line(80, "fit"), line(9, "on_train_end"), C10D)
    return script.collective(line(9, "on_train_end"), "all_gather").waits(samples=(sample(stack(*frames)),))


def forwarded(script: Script) -> Rank:
    """Return a rank thrown out of a forward of DDP without gradients, whose error names the forward alone."""
    failed = thrown_out(script.phase("ddp_forward_no_grad", 30, 1), line(30), DDP)
    return replace(failed, raised=(replace(failed.raised[0], in_call="ddp_forward"),))


ALONE = {
    "a barrier, and the others passed its line": (lambda s: s.collective(30, "barrier").waits(), 30, Confidence.HIGH),
    "thrown out of it, as the others closed their connections": (
        lambda s: thrown_out(s.collective(30), line(30), C10D),
        30,
        Confidence.HIGH,
    ),
    "in a hook, from a line that the others passed": (hooked, 9, Confidence.HIGH),
    "in a function of another file: they only destroyed the group": (
        lambda s: s.collective(line(7, "save", "/home/me/save.py"), "barrier").waits(),
        7,
        Confidence.MEDIUM,
    ),
    "a broadcast whose root does not wait, then a barrier": (
        lambda s: s.collective(30, "broadcast", peer=0).collective(31, "barrier").waits(),
        30,
        Confidence.HIGH,
    ),
    "an evaluation through DDP": (forwarded, 30, Confidence.HIGH),
    "a backward at a line of its own": (
        lambda s: s.phase("ddp_forward", 29, 0).phase("backward", 30, 1).waits(),
        30,
        Confidence.HIGH,
    ),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ALONE)
def test_the_rank_that_calls_alone_is_blamed(name: str, world: int) -> None:
    make, where, confidence = ALONE[name]
    others = [left(trained(n, world)) for n in range(1, world)]
    found = errors(make(trained(0, world)), *others)
    assert [(f.kind, f.ranks, [p.line for p in f.where], f.confidence) for f in found] == [
        ("mismatch", (0,), [where], confidence)
    ]
    assert f"but {'rank 1' if world == 2 else 'ranks 1 and 2'} did not call it" in found[0].summary
    assert "is_global_zero" in found[0].fix


def next_step(script: Script) -> Rank:
    return script.step().waits()


LEFT_EARLY = {
    "in the middle of a pattern that the other goes on with": (next_step, {}),
    "before a call that the other had not made yet, group and all left as they were": (
        lambda s: s.collective(30, "barrier").waits(),
        {"destroyed_at": None},
    ),
    "by sys.exit above the call": (
        lambda s: s.collective(30, "barrier").waits(),
        {"destroyed_at": None, "exit_call": line(28)},
    ),
}


@pytest.mark.parametrize("name", LEFT_EARLY)
def test_a_rank_that_left_early_is_an_early_exit(name: str) -> None:
    make, how = LEFT_EARLY[name]
    found = errors(make(trained(0, 2)), left(trained(1, 2), **how))
    assert [(f.kind, f.ranks) for f in found] == [("early-exit", (1,))]


def test_where_most_ranks_make_the_call_the_one_that_left_is_to_blame() -> None:
    callers = [trained(n, 3).collective(30, "barrier").waits() for n in (0, 1)]
    assert [(f.kind, f.ranks) for f in errors(*callers, left(trained(2, 3)))] == [("early-exit", (2,))]


def test_a_call_that_the_other_made_at_the_same_line_is_none_of_one_rank_alone() -> None:
    caller = trained(0, 2).collective(30).collective(30).waits()
    assert [(f.kind, f.ranks) for f in errors(caller, left(trained(1, 2).collective(30)))] == [("early-exit", (1,))]


def errors(*ranks: Rank):
    return [f for f in judge(job(*ranks)).findings if f.severity is Severity.ERROR]


# Ranks that run where nobody sees them: said plainly, and never taken for a hang of those that are seen.


def of_kind(judgment, kind):
    return [finding for finding in judgment.findings if finding.kind == kind]


def in_init(number, world):
    return rank(number, world, initialized=False, open_calls=(phase("init_process_group"),))


def test_ranks_of_a_world_that_is_larger_than_what_is_seen_are_named():
    found = judge(job(in_call(0, world=8), in_call(1, world=8), world_size=None, may_run_elsewhere=True))
    (finding,) = found.findings
    assert (finding.code, finding.ranks, finding.hosts) == ("DD901", (2, 3, 4, 5, 6, 7), ())
    assert "ranks 2-7 of 8 run on another host or in another container" in finding.summary
    assert not found.certain


def test_whoever_waits_in_init_for_unseen_ranks_is_not_stopped():
    found = judge(job(in_init(0, 3), in_init(1, 3), world_size=None, may_run_elsewhere=True))
    (missing,) = of_kind(found, "missing")
    assert (missing.ranks, missing.confidence) == ((2,), Confidence.LOW)
    assert "not seen here" in of_kind(found, "not-recorded")[0].summary
    assert not found.certain


def test_where_the_launcher_says_that_all_are_here_they_are_missing():
    found = judge(job(in_init(0, 3), in_init(1, 3), world_size=None))
    assert of_kind(found, "missing")[0].confidence is Confidence.HIGH
    assert of_kind(found, "not-recorded") == []
    assert found.certain


def test_a_silent_rank_may_wait_for_one_that_nobody_sees():
    seen, whole = (judge(job(in_user(0, world=2), world_size=None, may_run_elsewhere=more)) for more in (True, False))
    assert (of_kind(seen, "stuck")[0].confidence, seen.certain) == (Confidence.LOW, False)
    assert of_kind(whole, "not-recorded") == []


def test_a_rank_that_others_here_wait_for_is_stuck_whoever_is_elsewhere():
    found = judge(job(in_call(0, world=3), in_user(1, world=3), world_size=None, may_run_elsewhere=True))
    assert (of_kind(found, "stuck")[0].ranks, found.certain) == ((1,), True)


@pytest.mark.parametrize("waiting", [True, False])
def test_nodes_that_the_user_named_are_named_only_where_something_is_wrong(waiting):
    here = [in_call(n, world=4) if waiting else rank(n, 4, life=Life.EXITED, exit_code=0) for n in (0, 1)]
    found = judge(job(*here, world_size=4, nnodes=2, may_run_elsewhere=True))
    assert bool(of_kind(found, "not-recorded")) is waiting


def test_a_rank_that_keeps_the_recorder_out_says_why():
    kept_out = replace(rank(1, 2), recorded=False, lost="Python was started with -I, which turns off start-up hooks")
    found = judge(job(in_call(0, world=2), kept_out))
    (finding,) = of_kind(found, "not-recorded")
    assert finding.ranks == (1,)
    assert "-I" in finding.summary
    assert not found.certain


def test_what_a_torch_lacks_is_said_once_with_what_is_lost():
    ranks = [replace(in_call(n), lacks=("Work.wait",)) for n in range(3)]
    (finding,) = of_kind(judge(job(*ranks)), "not-recorded")
    assert finding.ranks == (0, 1, 2)
    assert finding.summary == (
        "ranks 0-2 could not be recorded completely: "
        "this torch has no Work.wait, so waits for asynchronous collectives are not recorded"
    )


def test_several_missing_hooks_are_one_finding_with_a_line_each():
    ranks = [replace(in_call(n), lacks=("Work.wait", "a hook of later") if n else ()) for n in range(3)]
    (finding,) = of_kind(judge(job(*ranks)), "not-recorded")
    assert finding.ranks == (1, 2)
    assert finding.evidence == (
        "Work.wait: waits for asynchronous collectives are not recorded",
        "a hook of later: its purpose is unknown",
    )


def test_a_torch_that_has_every_hook_is_not_spoken_of():
    assert of_kind(judge(job(*(in_call(n) for n in range(3)))), "not-recorded") == []


@pytest.mark.parametrize(
    ("lost", "evidence"),
    [
        ("gradients: KeyError: x", ("gradients failed, so NaN and inf in gradients are not detected",)),
        (
            "mesh step ends: KeyError: x; mesh step ends: y",
            ("mesh step ends failed, so ranks of a device mesh are not compared",),
        ),
        ("no ring could be made: No space left on device", ()),
    ],
)  # fmt: skip
def test_what_a_failing_part_costs_is_said(lost, evidence):
    (finding,) = of_kind(judge(job(in_call(0), replace(in_call(1), lost=lost), in_call(2))), "not-recorded")
    assert (finding.ranks, finding.evidence) == ((1,), evidence)
    assert ("update ddpdoctor" if evidence else "free disk space") in finding.fix
