"""Calls that one rank makes alone, after the others have passed them and left; and ranks that left too early."""

from dataclasses import replace

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Rank
from tests.golden import table
from tests.rules import build
from tests.rules.build import C10D, LONG_AGO, TORCH, S, ended, error, group, job, line, phase, sample, stack
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


def alone(world, make):
    """Judge a job in which rank 0 goes on so, and the others leave."""
    return judge(job(make(trained(0, world)), *(left(trained(n, world)) for n in range(1, world))))


test_rows = table("lone_calls", vars(build), globals(), head=build.sureness)
