"""Each kind of verdict over NCCL without DETAIL, from entries of the flight recorders of three builds of torch.

Those of "nccl2" in torch 2.15 have the form of tests/data/flight-recorder/nccl2-2.15.json, where such a backend was
stood in for. ProcessGroupNCCL, which is "nccl" in 2.6 and 2.13, needs a GPU: its form is that of FlightRecorder.cpp.
"""

from dataclasses import dataclass, replace

from ddpdoctor.collect.recorded import device_times, pending_on_device, read_flight
from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import GroupState
from ddpdoctor.model.log_facts import Called, Operation, Seen, Spot, Trouble, Who
from ddpdoctor.rules.logs.state import resolve
from tests.golden import outline, table
from tests.rules import build
from tests.rules.build import (
    LONG_AGO,
    NOW,
    S,
    backwards,
    call,
    ended,
    job,
    line,
    moving,
    pack_calls,
    rank,
    sample,
    stack,
)

WALL = 1_795_000_000 * S
"""Where CLOCK_REALTIME is when CLOCK_MONOTONIC is 0."""


@dataclass(frozen=True)
class Build:
    """How a build of torch writes its entries."""

    backend: str
    timed: bool = False

    def state(self, reported):
        """nccl2 never says that a kernel has started, nor does ProcessGroupNCCL without timing."""
        return "scheduled" if reported == "started" and not self.timed else reported


BUILDS = {
    "2.6": Build("nccl"), "2.13": Build("nccl"), "2.15": Build("nccl2"),
    "2.6 timed": Build("nccl", timed=True), "2.13 timed": Build("nccl", timed=True),
}  # fmt: skip
TIMED = [name for name, build in BUILDS.items() if build.timed]


def entry(build, seq, op="all_reduce", reported="completed", *, group="0", at_ns=LONG_AGO, **more):
    """One entry."""
    done = reported == "completed"
    state = build.state(reported)
    return {
        "record_id": seq, "pg_id": int(group), "process_group": [group, "undefined"], "collective_seq_id": seq,
        "p2p_seq_id": 0, "op_id": seq, "profiling_name": f"{build.backend}:{op}", "time_created_ns": WALL + at_ns + seq,
        "input_sizes": [[16]], "input_dtypes": ["Float"], "output_sizes": [[16]], "output_dtypes": ["Float"],
        "state": state, "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": done,
        "timeout_ms": 600000, "is_p2p": False, **more,
    }  # fmt: skip


def p2p(build, name, reported="scheduled"):
    return entry(build, 7, name, reported, is_p2p=True, p2p_seq_id=1)


def run(build, done, *rest, reported="started"):
    """The entries of a rank of which so many all_reduces are complete, one is under way and the rest are queued."""
    states = (reported, *["scheduled"] * len(rest))
    later = [entry(build, done + 1 + n, op, states[n]) for n, op in enumerate(rest)]
    return [*(entry(build, n) for n in range(1, done + 1)), *later]


def seen(build, number, entries, recorded, *, world=3, groups=None, **more):
    """A rank whose host stands at a line such as ``loss.item()``, by its records and by torch's entries."""
    groups = groups or (GroupState(name="0", ranks=tuple(range(world)), backend="nccl", enqueued=len(recorded)),)
    answer = {"wall_ns": WALL + NOW, "at": NOW, "timed": int(build.timed), "entries": entries}
    flight = read_flight({"flight_recorder": answer})
    log = pack_calls(recorded)
    more.setdefault("samples", (sample(stack(line(40, "step"))),))
    return rank(
        number, world, recent_calls=log, groups=groups, open_calls=pending_on_device(flight, log, groups),
        device_times=device_times(flight), **more,
    )  # fmt: skip


def made(*ops, group="0"):
    return tuple(call(op, n, 20, index=n, group=group, open_=False) for n, op in enumerate(ops, start=1))


def reduces(count):
    return made(*["all_reduce"] * count)


def waits(build, number, ahead=0, reported="started", **more):
    rest = ["all_reduce"] * (1 + ahead)
    return seen(build, number, run(build, 6, *rest, reported=reported), reduces(7 + ahead), **more)


def sleeps(build, number, **more):
    return seen(build, number, run(build, 6), reduces(6), **more)


def reducing(build, number, entries, enqueued):
    """A rank of DDP: the reducer's buckets stand under the backwards that made them."""
    groups = (GroupState(name="0", ranks=(0, 1, 2), backend="nccl", enqueued=enqueued),)
    return seen(build, number, entries, backwards(3, last=enqueued), groups=groups)


def stuck(b):
    return [waits(b, 0, ahead=200), sleeps(b, 1), waits(b, 2)]


def stuck_in_ddp(b):
    pending = run(b, 6, "all_reduce")
    return [reducing(b, 0, pending, 7), reducing(b, 1, run(b, 6), 6), reducing(b, 2, pending, 7)]


def mismatch(b):
    other = seen(
        b, 1, run(b, 6, "broadcast", "all_reduce"), (*reduces(6), call("broadcast", 7, 33, index=7, open_=False))
    )
    return [waits(b, 0, ahead=9), other, waits(b, 2, ahead=4)]


def mismatch_compiled(b):
    return [seen(b, n, run(b, 6, "broadcast" if n == 1 else "all_reduce"), ()) for n in range(3)]


def circle(b):
    groups = [GroupState(name=name, ranks=(0, 1), backend="nccl", enqueued=6) for name in "01"]
    own = (replace(groups[0], enqueued=7), groups[1]), (groups[0], replace(groups[1], enqueued=7))
    logs = (*reduces(7),), (*reduces(6), call("all_reduce", 7, 20, index=9, group="1", open_=False))
    return [
        seen(b, n, [entry(b, 7, "all_reduce", "started", group=str(n))], logs[n], world=2, groups=own[n])
        for n in (0, 1)
    ]


def both_receive(b):
    return [
        seen(b, 0, [p2p(b, "recv 0<-1")], reduces(6), world=2), seen(b, 1, [p2p(b, "recv 1<-0")], reduces(6), world=2),
    ]  # fmt: skip


def no_partner(b):
    return [seen(b, 0, [p2p(b, "recv 0<-1")], reduces(6), world=2), sleeps(b, 1, world=2)]


def exchange(b):
    """A batch of a send and a receive on each rank: both have come, and neither ends."""
    ends = [("send 0->1", "recv 0<-1"), ("send 1->0", "recv 1<-0")]
    return [seen(b, n, [p2p(b, name) for name in ends[n]], reduces(6), world=2) for n in (0, 1)]


def left(b):
    return [waits(b, 0, ahead=3), ended(1, recent_calls=reduces(6)), waits(b, 2)]


def untold(number, calls, idle, *, host=(), op="all_reduce", world=2, **more):
    """A rank of torch 2.15 under DETAIL: what it queues is retired at once. ``host``: its host is in these calls."""
    queued = [entry(BUILDS["2.15"], n, op, "scheduled", retired=True) for n in range(1, calls + 1)]
    inside = [entry(BUILDS["2.15"], calls + 1 + at, name, "scheduled") for at, name in enumerate(host)]
    log = pack_calls(made(*[op] * calls))
    more.setdefault("samples", (sample(stack(line(40, "step"))),))
    answer = {"wall_ns": WALL + NOW, "at": NOW, "timed": 0, "entries": [*queued, *inside], "idle": idle}
    flight = read_flight({"flight_recorder": answer})
    enqueued = calls + len(host)
    groups = (GroupState(name="0", ranks=tuple(range(world)), backend="nccl", enqueued=enqueued, timeout_s=20),)
    return rank(
        number, world, recent_calls=log, groups=groups, open_calls=pending_on_device(flight, log, groups),
        device_idle=flight.idle, device_unread=flight.untold is not None and flight.idle is None, **more,
    )  # fmt: skip


def receives(number, idle):
    """A rank that has queued a receive, which DETAIL does not compare, and stands behind it."""
    name = f"recv {number}<-{1 - number}"
    one = entry(BUILDS["2.15"], 7, name, "scheduled", is_p2p=True, p2p_seq_id=1, retired=True)
    answer = {"wall_ns": WALL + NOW, "at": NOW, "timed": 0, "entries": [one], "idle": idle}
    groups = (GroupState(name="0", ranks=(0, 1), backend="nccl", enqueued=6),)
    pending = pending_on_device(read_flight({"flight_recorder": answer}), pack_calls(()), groups)
    return rank(
        number, 2, groups=groups, open_calls=pending, device_idle=bool(idle), samples=(sample(stack(line(40, "step"))),)
    )


def paced(b, durations_ms, count=120, members=(0, 1, 2)):
    """Ranks whose completed collectives ran so long; every fourth is the first of a step, the rest wait for nobody."""
    ranks = []
    for number, first_ms in enumerate(durations_ms):
        entries = [
            entry(b, n, duration_ms=first_ms if n % 4 == 1 else 0.4, retired=True) for n in range(1, count + 1)
        ]  # fmt: skip
        groups = (GroupState(name="0", ranks=members, backend="nccl" if members else "", enqueued=count),)
        ranks.append(seen(b, number, entries, reduces(count), groups=groups, steps=count // 4, started_ns=NOW - 6 * S))
    return job(*map(moving, ranks))


def test_what_a_rank_noted_before_it_ended_its_groups_is_read_and_damage_passed_over():
    rows = [["0", 1, "all_reduce", 2.5], ["0", 2, "_all_gather_base", 3], ["0", "2", "x", 1.0], 7, ["0", 3, "y", -1.0]]
    found = device_times(read_flight({}), [{"k": "device_times", "rows": rows, "at": 1}])
    assert [(one.seq, one.op, one.ran_ms) for one in found] == [
        (1, "all_reduce", 2.5), (2, "all_gather_into_tensor", 3.0),
    ]  # fmt: skip
    assert device_times(read_flight({})) == device_times(read_flight({}), [{"k": "device_times", "rows": None}]) == ()


def slow_kernel(b):
    return [moving(waits(b, n, ahead=150, reported="scheduled")) for n in range(3)]


def compiles(b):
    return [waits(b, 0), moving(sleeps(b, 1)), waits(b, 2)]


def exchanged(b):
    """The parts of a batch stay "scheduled" for ever: the entry that ends it has completed."""
    parts = [p2p(b, "send 0->1"), p2p(b, "recv 0<-1"), p2p(b, "coalesced", "completed")]
    return [moving(seen(b, 0, parts, reduces(6), world=2)), moving(sleeps(b, 1, world=2))]


def exports(b):
    return [moving(sleeps(b, 0)), ended(1, recent_calls=reduces(6)), ended(2, recent_calls=reduces(6))]


# Calls of NCCL's logs, compared between ranks, and which rank and host a line is about.


def called(rank, number, op="all_reduce", count=64, group="comm 0x6e"):
    operation = Operation(op=op, group=group, seq=number, numel_in=count, dtype="float32")
    return Called(who=Who(rank=rank), spot=Spot(source=f"{rank}.log", line=number + 1), operation=operation)


PAIRS = "comm no. 0 of 2 ranks"
REVERSED = [called(0, 1), called(0, 1, "all_gather"), called(1, 1, "all_gather"), called(1, 1)]


# A fault of a GPU is its rank's, if the evidence says which rank had it.


SPOT = Spot(source="log", line=1)


def on(rank, gpu, host="g7"):
    return Seen(who=Who(rank=rank, host=host), spot=SPOT, gpu=gpu)


def at_fault(others, who, gpu):
    fault = Trouble(who=who, spot=SPOT, kind="xid", problem="it had Xid 79", gpu=gpu)
    resolved = resolve([*others, fault], None)[-1].who
    return resolved.rank, resolved.host


def of_every_build(make):
    """Return the findings of each build of torch; those of builds with the same are told once."""
    told = {}
    for name, one in BUILDS.items():
        found = [(f.kind, f.ranks, f.confidence.value, f.summary) for f in judge(job(*make(one))).findings]
        told.setdefault(outline(found), []).append(name)
    return [f"{', '.join(names)}: {found}" for found, names in told.items()]


def came_last(durations_ms, count):
    """Return what is found over builds that time kernels, of groups that run and of those that ended."""
    judged = [judge(paced(BUILDS[one], durations_ms, count, members)) for one in TIMED for members in ((0, 1, 2), ())]
    found = [[(f.severity.value, f.kind, f.ranks) for f in one.findings] for one in judged]
    assert found == found[:1] * 4
    return found[0]


test_rows = table("flight_verdicts", "ddpdoctor.rules.logs.calls", vars(build), globals(), head=build.sureness)
