"""The timeline of a job: what each rank did, when the fault was, which lanes are kept in full, and how large it is."""

import json
from array import array
from dataclasses import replace

import pytest

from ddpdoctor.collect.run import read_job
from ddpdoctor.diagnose.job import judge_job
from ddpdoctor.diagnose.logs import analyze
from ddpdoctor.diagnose.pictures import LANE_DETAIL_SPANS, make_timeline, rank_row
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.facts import DeviceState, Life, Save
from ddpdoctor.model.pictures import RankWaits, SpanKind, Timeline
from ddpdoctor.model.steps import Speed, StepEnd, StepParts, StepTimes
from ddpdoctor.report.text import render_text
from ddpdoctor.rules.engine import pick_verdict
from ddpdoctor.rules.progress.job_state import build_job_state
from tests.flight_dumps import recorders, write
from tests.golden import Cases, outline, words
from tests.pictures import finding
from tests.rules.build import (
    LONG_AGO,
    NOW,
    S,
    call,
    crashed,
    error,
    failed_in,
    in_call,
    in_user,
    job,
    killed,
    line,
    pack_calls,
    phase,
    rank,
    sample,
    stack,
)
from tests.synthetic import Job, write_gathered

CASES = Cases(__name__)
MS = 1_000_000


def timeline_of(facts, *, finished=False, hung=True):
    """Return the timeline of a job as its report has it."""
    rows = {one.rank: rank_row(one) for one in facts.ranks}
    verdict = None if finished else pick_verdict(judge_job(facts).findings)
    waiters = build_job_state(facts).waits.waiters
    found = make_timeline(facts, rows, verdict, waiters=waiters, started_at="2026-01-01T00:00:00+00:00", hung=hung)
    assert decode(Timeline, json.loads(json.dumps(encode(found)))) == found
    return found


def ended_call(op="all_reduce", seq=None, start=0, end=10, **more):
    """Return a call that ended, with times in milliseconds after ``LONG_AGO``."""
    index = more.pop("index", 1 + start)
    return call(
        op, seq, index=index, open_=False, started_ns=LONG_AGO + start * MS, ended_ns=LONG_AGO + end * MS, **more
    )


def spans(lane, start_of=LONG_AGO - 100 * S):
    """Return kind, label and milliseconds after ``LONG_AGO`` of a lane's spans."""
    ahead = (LONG_AGO - start_of) / MS
    return [
        (one.kind.value, one.label, round(one.start_ms - ahead, 3), one.end_ms and round(one.end_ms - ahead, 3))
        for one in lane.detail
    ]


def lane(timeline, number):
    return next(one for one in timeline.lanes if one.rank == number)


def stuck(world=3):
    """Rank 1 is in its own code since 20 ms; the others wait for it since 30 ms."""
    before = (ended_call(seq=6, start=0, end=20),)
    waits = {"recent": before, "started_ns": LONG_AGO + 30 * MS, "world": world}
    return job(*(in_user(1, recent_calls=before, world=world) if n == 1 else in_call(n, **waits) for n in range(world)))


def with_step(one, wait_ms):
    """Return a rank with a step whose backward, from 10 to 30 ms, waited so long for the reduction in its end."""
    times = StepTimes(
        ends_with=StepEnd.REDUCTION, group="", numbers=(1,), phases_us=((0,), (0,), (0,), (20_000,)),
        waits_us=((0,), (0,), (0,), (wait_ms * 1000,)), ended_ns=(LONG_AGO + 30 * MS,),
    )  # fmt: skip
    backward = phase("backward", index=2, open_=False, started_ns=LONG_AGO + 10 * MS, ended_ns=LONG_AGO + 30 * MS)
    return replace(one, step_times=times, recent_calls=pack_calls([backward]))


def late_to_a_collective():
    late = (ended_call(seq=5, start=8, end=12), ended_call(seq=6, start=20, end=30))
    early = (ended_call(seq=5, start=8, end=12), ended_call(seq=6, start=13, end=30))
    return job(in_user(0, recent_calls=late, world=2), in_call(1, recent=early, started_ns=LONG_AGO + 40 * MS, world=2))


def failed():
    before = pack_calls([ended_call(seq=6, start=0, end=20)])
    root = replace(crashed(1, error(at=LONG_AGO + 50 * MS)), recent_calls=before, ended_ns=LONG_AGO + 900 * MS)
    victims = [failed_in(n, "all_reduce", 7, at=LONG_AGO + S) for n in (0, 2)]
    return job(root, *victims, ended=True, launcher_status=1)


def waits_for_its_device():
    pending = call(seq=6, index=200, started_ns=LONG_AGO, device_state=DeviceState.STARTED)
    made = (ended_call(seq=6, start=0, end=1), phase("backward", index=2, open_=False, started_ns=LONG_AGO + MS))
    waits = replace(in_call(0, world=2), open_calls=(pending,), recent_calls=pack_calls(made))
    return job(replace(waits, samples=(sample(stack(line(33))),)), in_user(1, world=2, enqueued=5))


def killed_and_never_started():
    dead = replace(killed(0, world=2), open_calls=(call(seq=3, started_ns=LONG_AGO - S),))
    return job(dead, rank(1, world=2, life=Life.NEVER_STARTED), world_size=2, ended=True)


def ended_well():
    ranks = [
        rank(n, world=2, life=Life.EXITED, exit_code=0, ended_ns=NOW, recent_calls=(ended_call(seq=6),)) for n in (0, 1)
    ]
    return job(*ranks, ended=True, launcher_status=0)


def saves(*calls, ended_ms=35):
    """A job of one rank with these calls and a torch.save that began 15 ms after them and ended then, or is open."""
    ended_ns = None if ended_ms is None else LONG_AGO + ended_ms * MS
    save = Save(began_ns=LONG_AGO + 15 * MS, ended_ns=ended_ns)
    return job(in_user(0, recent_calls=calls, last_save=save, world=1))


NESTED = (
    phase("ddp_forward", index=1, open_=False, started_ns=LONG_AGO, ended_ns=LONG_AGO + 50 * MS),
    ended_call(seq=5, start=10, end=20, index=2),
    ended_call(seq=6, start=45, end=200, index=3, is_async=True),
    ended_call("barrier", seq=7, start=60, end=61, index=4),
)
BEFORE = ended_call(seq=5, start=0, end=10)


def timeline_in_words(row):
    """Return the lanes of a job; times are milliseconds after ``LONG_AGO``, 100 s after the start."""
    seen = eval(f"timeline_of({row})")
    lanes = {
        f"rank {one.rank}{', blamed' * one.blamed}": [
            *map(" ".join, ((kind, label, str(start), str(end)) for kind, label, start, end in spans(one))),
            *(
                f"whole run: {span.kind.value} {span.label} {span.number or 0} "
                f"to {span.end_ms and round(span.end_ms - 100e3, 3)}"
                for span in one.coarse
            ),
            *(outline(replace(span, start_ms=0.0, end_ms=0.0)) for span in one.detail[-1:]),
        ]
        for one in seen.lanes
    }
    times = [round(one / 1e3 - 100, 3) for one in (seen.detail_from_ms, seen.length_ms)]
    events = [(one.label, one.ranks, one.fault, round(one.at_ms - 100e3, 3)) for one in seen.events]
    return {"classes": seen.classes, "detail from, length in s": times, "events": events} | lanes


test_words = words(__name__, timeline_of=timeline_in_words)


def test_what_a_hung_job_raised_when_it_was_stopped_is_left_out():
    facts = stuck()
    stopped = tuple(
        replace(one, life=Life.SIGNALED, signal="SIGTERM", after_stop=True, ended_ns=NOW + S,
                raised=(error("RuntimeError", at=NOW + S // 2, in_call="all_reduce"),))
        for one in facts.ranks
    )  # fmt: skip
    facts = replace(facts, ranks=stopped, stopping_since_ns=NOW, ended=True)
    rows = {one.rank: rank_row(one, NOW) for one in facts.ranks}
    verdict = finding("DD601", "stuck", ranks=(1,))
    found = make_timeline(facts, rows, verdict, waiters=(0, 2), started_at="", hung=True)
    assert [one.label for one in found.events] == ["DD601 stuck", "the job is stopped"]
    assert spans(lane(found, 0))[-1] == ("wait", "all_reduce", 30, None)


def steps(count, *, slow=0, first=1):
    """Return speed and step times of so many steps of 10 ms, the step ``slow`` with 400 ms."""
    walls = [400.0 if number == slow else 10.0 for number in range(first, first + count)]
    ends = [LONG_AGO + int(sum(walls[: at + 1]) * MS) for at in range(count)]
    nothing = array("I", bytes(4 * count))
    kept = StepParts(
        numbers=range(first, first + count), parts_ms={"wall": walls}, is_even=bytes(count), is_split=bytes(count),
        cpu_ms={}, reductions=nothing, backwards=nothing, input_rows=nothing, input_numel=nothing, ended_ns=ends,
    )  # fmt: skip
    return Speed(ends_with=StepEnd.OPTIMIZER, group="", count=count, sample_bits=0, kept=kept)


def few_steps(numbers, ended_s):
    """Return speed and step times of which these steps alone were kept."""
    speed = steps(len(numbers))
    kept = replace(speed.kept, numbers=numbers, ended_ns=tuple(LONG_AGO + at * S for at in ended_s))
    return replace(speed, kept=kept)


def test_two_hosts_with_different_clocks_are_on_one(tmp_path):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="stuck", tp=2), hosts=2, skew_ns=3600 * S)
    facts = read_job(tmp_path)
    assert len({one.host for one in facts.ranks}) == 2
    found = timeline_of(facts)
    firsts = {one.coarse[0].start_ms for one in found.lanes}
    steps = [[one for one in lane.coarse if one.kind is SpanKind.STEP] for lane in found.lanes]
    assert firsts == {0.0}
    assert all(one == steps[0] for one in steps)
    assert found.length_ms < 100_000


def large(world, calls=4096):
    """A job whose ranks have full rings, of which every eighth is at another line."""
    log = pack_calls([
        ended_call("all_reduce" if n % 2 else "backward", n if n % 2 else None, 2 * n, 2 * n + 1, index=n + 1,
                   site=n % 300, shape=(1024, 1024))
        for n in range(calls)
    ])  # fmt: skip
    speed = steps(320)
    more = {"recent_calls": log, "speed": speed, "world": world, "host": "compute-node-0117.cluster.example"}
    return job(*(in_user(n, *[], **more, last_place=None) for n in range(world)))


@pytest.mark.full
@pytest.mark.parametrize(("world", "most_kib"), [(8, 400), (1024, 3 * 1024)])
def test_the_size_has_a_limit(world, most_kib):
    facts = large(world)
    blamed = tuple(range(1, world, 2))
    verdict = finding("DD601", "stuck", ranks=blamed)
    rows = {one.rank: replace(rank_row(one), state=f"in all_reduce_{one.rank % 64}") for one in facts.ranks}
    found = make_timeline(facts, rows, verdict, waiters=range(world), started_at="", hung=True)
    assert len(found.lanes) == world
    assert len(found.classes) == min(world, 64)
    assert sum(bool(one.detail) for one in found.lanes) == min(world, 48)
    assert all(len(one.detail) <= LANE_DETAIL_SPANS for one in found.lanes)
    text = json.dumps({"data": {"timeline": encode(found)}}, indent=2)
    assert len(text) <= most_kib * 1024


# The pictures of `analyze`: times come from the dumps of flight recorders, and waits from what all sources say.


def analyzed(folder):
    return analyze([str(folder)], ("ddpdoctor", "analyze"), "2026-01-01T00:00:00.000+00:00")


def hung(folder, late=1, world=3, calls=30):
    """All ranks make so many all_reduces, and all but one the next."""
    for one in recorders(world):
        for _ in range(calls):
            one.call()
        if one.rank != late:
            one.call(state="scheduled", line=41)
        write(folder, one.rank, one.body())
    return analyzed(folder)


def opposite(folder):
    """Two groups in opposite order."""
    for one in recorders(2, {"1": [0, 1], "2": [0, 1]}):
        for _ in range(5):
            one.call()
        for group in ("1", "2") if one.rank == 0 else ("2", "1"):
            one.call(group=group, state="scheduled")
        write(folder, one.rank, one.body())
    return analyzed(folder)


@CASES
def pictures_of_dumps(tmp_path):
    """Calls and the wait that has no end, and waits that are those of the sources."""
    found = {}
    for make in (hung, opposite):
        folder = tmp_path / make.__name__
        folder.mkdir()
        report = make(folder)
        timeline = decode(Timeline, report.data["timeline"])
        lanes = tuple(replace(one, detail=(*one.detail[:1], *one.detail[-2:])) for one in timeline.lanes)
        lengths = [len(one.detail) for one in timeline.lanes]
        waits = decode(RankWaits, report.data["waits"])
        is_marked = f"{report.verdict.code} {report.verdict.kind}, rank 1 v" in render_text(
            report, width=None, color=False, run_dir=None
        )
        found[make.__name__] = [report.verdict.kind, lengths, replace(timeline, lanes=lanes), waits, f"{is_marked=}"]
    return found


def test_calls_whose_ends_are_not_known_have_no_length(tmp_path):
    for one in recorders(2):
        for _ in range(5):
            one.call()
        body = one.body()
        for entry in body["entries"]:
            entry["time_discovered_completed_ns"] = "soon"
        write(tmp_path, one.rank, body)
    timeline = decode(Timeline, analyzed(tmp_path).data["timeline"])
    assert {one.end_ms - one.start_ms for one in timeline.lanes[0].detail[:-1]} == {0.0}


def test_without_dumps_there_is_no_timeline(tmp_path):
    (tmp_path / "job.log").write_text("[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad\n")
    data = analyzed(tmp_path).data
    assert (data["timeline"], data["waits"]) == (None, None)


test_kept = CASES.test()
