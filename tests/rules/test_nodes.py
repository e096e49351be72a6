"""Jobs of several nodes: one that never came, one that was lost, and views of one node alone."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Rank
from ddpdoctor.model.findings import Confidence, Severity
from tests.rules.build import (
    C10D,
    LONG_AGO,
    TORCH,
    S,
    ended,
    error,
    group,
    job,
    line,
    phase,
    sample,
    stack,
)
from tests.rules.test_disagreement import Script

# A node that never came


# A node that was lost


# Facts of all nodes together


# A call that one rank makes alone, after the others have passed it and left; and ranks that left too early.


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
    found = errors_lone_calls(make(trained(0, world)), *others)
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
    found = errors_lone_calls(make(trained(0, 2)), left(trained(1, 2), **how))
    assert [(f.kind, f.ranks) for f in found] == [("early-exit", (1,))]


def test_where_most_ranks_make_the_call_the_one_that_left_is_to_blame() -> None:
    callers = [trained(n, 3).collective(30, "barrier").waits() for n in (0, 1)]
    assert [(f.kind, f.ranks) for f in errors_lone_calls(*callers, left(trained(2, 3)))] == [("early-exit", (2,))]


def test_a_call_that_the_other_made_at_the_same_line_is_none_of_one_rank_alone() -> None:
    caller = trained(0, 2).collective(30).collective(30).waits()
    assert [(f.kind, f.ranks) for f in errors_lone_calls(caller, left(trained(1, 2).collective(30)))] == [
        ("early-exit", (1,))
    ]


def errors_lone_calls(*ranks: Rank):
    return [f for f in judge(job(*ranks)).findings if f.severity is Severity.ERROR]


# Ranks that run where nobody sees them: said plainly, and never taken for a hang of those that are seen.
