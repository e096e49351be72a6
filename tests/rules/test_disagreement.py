"""Who departs: extra, missing and shifted calls, beside what DDP's C++ takes, as the records of real runs have it."""

from dataclasses import replace

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model import facts
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.majority import Voice, compare, describe
from ddpdoctor.rules.progress.job_state import build_job_state
from ddpdoctor.rules.progress.transport import find_targets
from tests.golden import outline, table
from tests.rules import build
from tests.rules.build import (
    AUTOGRAD,
    C10D,
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
    model_of,
    pack_calls,
    phase,
    rank,
    sample,
    stack,
)
from tests.rules.environment import build as machine  # noqa: F401 - of the rows


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

    def rounds(self, count, act):
        for _ in range(count):
            act(self)
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
    return script.build().steps(12)


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
    return script


HALF, FULL = {"dtype": "torch.bfloat16"}, {"dtype": "torch.float32"}


def finished(*kinds, status=0):
    """A job that ended, in which each rank broadcast such a tensor, and used both dtypes at one line."""
    found = [Script(n, len(kinds)) for n in range(len(kinds))]
    for script in found:
        script.collective(31, "broadcast", peer=0, **kinds[script.number])
        for step in range(8):
            script.collective(12, **(HALF if step % 2 else FULL))
    ranks = [ended(s.number, s.world, recent_calls=tuple(s.calls), groups=(group(9, s.world),)) for s in found]
    return job(*ranks, ended=True, launcher_status=status)


def differs_as(odd, usual, odd_stack=(), usual_stack=(), **more):
    """Three ranks whose last call differs on rank 1, with what each was inside of."""
    found = scripts(3)
    for script in found:
        alternating(script)
        (odd if script.number == 1 else usual)(script)
    stacks = [odd_stack if n == 1 else usual_stack for n in range(3)]
    ranks = [
        script.waits(**more, **({"samples": (sample(stack(*frames)),)} if frames else {}))
        for script, frames in zip(found, stacks, strict=True)
    ]
    return judge(job(*ranks))


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
    broken = replace(broken, recent_calls=pack_calls(_failing(found[2].step().calls)))
    report = judge(job(found[0].waits(), reported, broken, ended=True, stopping_since_ns=LONG_AGO + 3 * S))
    errors = [f for f in report.findings if f.severity is Severity.ERROR]
    assert [(f.kind, f.ranks, [p.line for p in f.where]) for f in errors] == [("mismatch", (0,), [16])]


def _failing(calls):
    return (*calls[:-1], replace(calls[-1], failed=True))


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
    broken = replace(failed, recent_calls=pack_calls((*before, *inside)), raised=error)
    errors = [f for f in judge(job(broken, gone, ended=True)).findings if f.severity is Severity.ERROR]
    assert [(f.kind, f.ranks) for f in errors] == [("early-exit", (1,))]


# Who differs from the majority, and how that is said.


def voices(*values, by_rank=False):
    return [Voice(host=f"node{i // 2 if by_rank else i}", ranks=(i,), value=value) for i, value in enumerate(values)]


A_OF_8 = ["a"] * 5
ONE, OTHERS = "torch 2.11.0 on node3, 2.13.0 on 15 others", ["2.13.0"] * 12


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


def trains(number, moved):
    """A rank in a backward, whose records name the model that ran last, and of which one group has moved since."""
    calls = tuple(phase("ddp_forward", 12, group=str(n), index=n, open_=False, begun=6) for n in (1, 2))
    pending = phase("backward", 14 + number, group="2", index=3, begun=6)
    counters = tuple(group(7 if name == moved else 6, 2, name) for name in ("1", "2"))
    both = (model_of("1"), model_of("2"))
    return rank(number, 2, recent_calls=calls, open_calls=(pending,), groups=counters, models=both)


# Who waits for whom, rank by rank, as a picture of the waits needs it.


def in_group(number, name, members, seq, others):
    """A rank that waits in a group of its own, and has come as far as ``others`` say in the other groups."""
    groups = (group(0, 4), group(seq, 4, name, members), *(group(n, 4, other, who) for other, who, n in others))
    pending = call(seq=seq, group=name)
    return replace(
        rank(number, 4), open_calls=(pending,), groups=groups, samples=(sample(stack(line(20), C10D)),)
    )  # fmt: skip


OF_THREE = {"groups": (group(7, 3),)}


def departs(common, departing, usual):
    """Return the verdicts on jobs of which one rank departs; those that are the same but for the rank are told once."""
    told = {}
    for world, odd in ((2, 0), (2, 1), (3, 0), (3, 2), (4, 1)):
        found = judge(one_differs(world, odd, common, departing, usual))
        said = [
            (f.kind, f.ranks == (odd,), [p.line for p in f.where], f.confidence.value, found.certain)
            for f in found.findings
        ]
        told.setdefault(outline(said), []).append(f"{odd} of {world}")
    return [f"{', '.join(names)}: {said}" for said, names in told.items()]


def differs(values, noun="torch", *, by_rank=False, **how):
    split = compare(voices(*values, by_rank=by_rank))
    return split and (split.hosts, split.majority, split.confidence, describe(split, noun, by_rank=by_rank, **how))


def targets(ranks, **more):
    facts = job(*ranks, ended=any(rank.life is Life.EXITED for rank in ranks), **{"world_size": len(ranks), **more})
    return [f"{number} for {sorted(whom)}" for number, whom in find_targets(build_job_state(facts)).items()]


test_rows = table(
    "disagreement",
    "ddpdoctor.model.words ddpdoctor.rules.majority ddpdoctor.rules.progress.calls",
    vars(facts),
    vars(build),
    globals(),
    head=build.sureness,
)
