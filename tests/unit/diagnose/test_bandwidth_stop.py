"""From where the ranks of a bench stood to who is to blame."""

from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.diagnose.bandwidth import describe_rank, stop_findings
from ddpdoctor.model.bandwidth import Bench, BenchSettings, Ending, Member, Position, Stop

LIMIT_S = 60.0
TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py:3000 all_reduce"
OURS = f"{Path(ddpdoctor.__file__).parent}/probes/bandwidth/collectives.py:49 <lambda>"
PLUGIN = "/home/me/plugin.py:12 all_reduce"
EVERYBODY = (0, 1, 2)


def member(rank, host="node0"):
    fields = {"device": "cpu", "device_name": "", "cores": 1, "version": "", "torch": ""}
    return Member(rank=rank, local_rank=rank, host=host, pid=1000 + rank, **fields)


def position(rank, *, group=EVERYBODY, calls=7, op="all_reduce", inside=True, stack=(OURS, TORCH), **more):
    fields = {"phase": "measure", "what": "all_reduce float32 1 MiB", "stale_s": LIMIT_S + 1, **more}
    return Position(rank=rank, group=group, calls=calls, op=op, inside=inside, stack=stack, **fields)


def between(rank, calls=6, **more):
    """A rank that is between two calls."""
    return position(rank, calls=calls, inside=False, stack=(OURS,), **more)


def connecting(rank, **more):
    return position(rank, phase="connect", what="", op="init_process_group", calls=1, **more)


def starting(rank, **more):
    fields = {"phase": "start", "what": "", "op": "", "group": (), "calls": 0, **more}
    return position(rank, inside=False, stack=(PLUGIN,), **fields)


def in_pair(rank, *pair, calls=3, **more):
    return position(rank, group=pair, calls=calls, phase="pairs", what="all_reduce float32 8 MiB", **more)


def bench(*positions, ending=Ending.HUNG, hosts=("node0",) * 3, signal=None, backend="gloo"):
    members = tuple(member(rank, host) for rank, host in enumerate(hosts))
    phase = next((one.phase for one in positions), "measure")
    stop = Stop(ending=ending, phase=phase, positions=positions, signal=signal)
    return Bench(settings=BenchSettings(hang_timeout_s=LIMIT_S, backend=backend), members=members, stop=stop)


HUNG = {
    "a wrapper of the call holds a rank up": (
        (position(0), position(1, stack=(OURS, PLUGIN)), position(2)),
        ("stuck", (1,), [12], "high"),
    ),
    "a wrapper that waits in a library of Python": (
        (position(0), position(1, stack=(OURS, PLUGIN, "/usr/lib/python3.12/threading.py:359 wait")), position(2)),
        ("stuck", (1,), [12], "high"),
    ),
    "a rank is between calls": (
        (position(0), between(1), position(2)),
        ("stuck", (1,), [49], "high"),
    ),
    "a rank came to a pause of the others a little later": (
        (position(0, stale_s=70), between(1, stale_s=45), position(2, stale_s=70)),
        ("stuck", (1,), [49], "high"),
    ),
    "a rank is stopped": (
        (position(0, states={"1": "T", "2": "S"}), position(2, states={"0": "S", "1": "T"})),
        ("stopped", (1,), [], "high"),
    ),
    "the rank that served the store is stopped, and a third could not be asked": (
        (position(1, states={"0": "T", "2": "S"}),),
        ("stopped", (0,), [], "high"),
    ),
    "a rank sleeps in the kernel": (
        (position(0, states={"1": "D"}), position(2, states={"1": "D"})),
        ("stopped", (1,), [], "medium"),
    ),
    "a rank does not answer though it runs": (
        (position(0, states={"1": "R"}), position(2)),
        ("stuck", (1,), [], "low"),
    ),
    "all are in the call": (
        (position(0), position(1), position(2)),
        ("transport", (0, 1, 2), [49, 49, 49], "low"),
    ),
    "all are in the call, and one waits in a line of ours": (
        (position(0), position(1, stack=(OURS,)), position(2)),
        ("transport", (0, 1, 2), [49, 49, 49], "low"),
    ),
    "the root of a broadcast is done with it": (
        (position(0, op="barrier", calls=8), position(1, op="broadcast"), position(2, op="broadcast")),
        ("transport", (0, 1, 2), [49, 49, 49], "low"),
    ),
    "a pair does not get through, and the third waits for it": (
        (in_pair(0, 0, 1), in_pair(1, 0, 1), position(2, op="barrier", calls=40, phase="pairs", what="")),
        ("transport", (0, 1), [49, 49], "low"),
    ),
    "one of a pair does not come, and the third waits for both": (
        (in_pair(0, 0, 1), between(1, group=(0, 1), calls=2), position(2, op="barrier", calls=40)),
        ("stuck", (1,), [49], "high"),
    ),
    "a rank is held up before it connects": (
        (connecting(0), starting(1), connecting(2)),
        ("stuck", (1,), [12], "high"),
    ),
    "nobody gets further while they connect": (
        (connecting(0), connecting(1), position(2, phase="connect", inside=False, calls=0, op="", group=())),
        ("stuck", (2,), [49], "high"),
    ),
    "a rank that came to its end is waited for": (
        (position(0), between(1, phase="end"), position(2)),
        ("early-exit", (1,), [49], "high"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUNG)
def test_hang(name):
    positions, (kind, ranks, lines, confidence) = HUNG[name]
    (finding,) = stop_findings(bench(*positions))
    assert (finding.kind, finding.ranks, finding.confidence.value) == (kind, ranks, confidence)
    assert [place.line for place in finding.where] == lines
    assert finding.fix
    assert not [text for text in (finding.summary, *finding.evidence, finding.fix) if "not known" in text]


PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:5549"
FAILED = {
    "killed, and the others lost their connection": (
        (position(0, error=PEER, ends={"1": "SIGKILL"}, states={"1": "Z"}), position(2, error=PEER)),
        ("killed", (1,), "rank 1 was killed by SIGKILL"),
    ),
    "gone, and nobody saw how": (
        (position(0, error=PEER, states={"1": ""}), position(2, states={"1": ""})),
        ("killed", (1,), "rank 1 ended for an unknown reason"),
    ),
    "left with a status": (
        (position(0, ends={"1": "exit status 3"}, states={"1": "Z"}), position(2)),
        ("crash", (1,), "rank 1 exited with status 3"),
    ),
    "raised by a wrapper, whatever its type": (
        (position(0), position(1, error="RuntimeError: no", stack=(OURS, PLUGIN)), position(2, error=PEER)),
        ("crash", (1,), "rank 1 raised RuntimeError in all_reduce (plugin.py:12): no"),
    ),
    "raised by a call of torch's": (
        (position(0), position(1, error="RuntimeError: CUDA error: out of memory"), position(2)),
        ("crash", (1,), "rank 1 raised RuntimeError at collectives.py:49: CUDA error: out of memory"),
    ),
    "gave up to connect to one that did not come": (
        (connecting(0, error="StoreError: no message came from rank 1 within 60 s"), starting(1), connecting(2)),
        ("stuck", (1,), None),
    ),
    "cannot connect though all have come": (
        (connecting(0), connecting(1, error="StoreError: 10.0.0.1:4000 refuses", stack=(OURS,)), connecting(2)),
        ("crash", (1,), None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_failure(name):
    positions, (kind, ranks, summary) = FAILED[name]
    (finding,) = stop_findings(bench(*positions, ending=Ending.FAILED))
    assert (finding.kind, finding.ranks) == (kind, ranks)
    assert summary in {None, finding.summary}


def test_a_bench_that_finished_has_nobody_to_blame():
    assert stop_findings(Bench(settings=BenchSettings(), members=(member(0),))) == ()


@pytest.mark.parametrize("error", [None, PEER])
def test_a_bench_that_a_user_ended_has_nobody_to_blame(error):
    positions = (position(0, stale_s=5, error=error), between(1, stale_s=5), position(2, stale_s=5))
    assert stop_findings(bench(*positions, ending=Ending.INTERRUPTED, signal="SIGINT")) == ()


def test_a_user_who_ends_a_bench_that_hangs_gets_the_reason():
    positions = (position(0), between(1), position(2))
    (finding,) = stop_findings(bench(*positions, ending=Ending.INTERRUPTED, signal="SIGINT"))
    assert (finding.kind, finding.ranks) == ("stuck", (1,))


def test_transport_says_which_call_among_whom_and_what_to_look_at():
    far = bench(*map(position, EVERYBODY), hosts=("a", "b", "b"))
    (finding,) = stop_findings(far)
    assert finding.summary == "ranks 0-2 are in all_reduce float32 1 MiB, but it does not complete"
    assert finding.hosts == ("a", "b")
    assert "ddpdoctor check-env" in finding.fix
    (near,) = stop_findings(bench(*map(position, EVERYBODY), backend="nccl"))
    assert "NCCL_DEBUG" in near.fix


def test_pairs_that_fail_together_are_one_finding():
    members = tuple(member(rank) for rank in range(4))
    positions = (in_pair(0, 0, 1), in_pair(1, 0, 1), in_pair(2, 2, 3), in_pair(3, 2, 3))
    stop = Stop(ending=Ending.HUNG, phase="pairs", positions=positions)
    (finding,) = stop_findings(Bench(settings=BenchSettings(), members=members, stop=stop))
    assert (finding.kind, finding.ranks) == ("transport", (0, 1, 2, 3))
    assert finding.summary == (
        "ranks 0 and 1 are in all_reduce float32 8 MiB, ranks 2 and 3 are in all_reduce float32 8 MiB, "
        "but none of these completes"
    )


def test_a_host_that_is_silent_is_not_said_to_be_stuck_at_a_line():
    (finding,) = stop_findings(bench(position(0, states={}), hosts=("a", "b", "b")))
    assert (finding.ranks, finding.hosts, finding.where) == ((1, 2), ("b",), ())
    assert finding.summary == "ranks 1 and 2 do not respond anymore; rank 0 is waiting for them in all_reduce"
    assert finding.evidence == (
        "rank 0: in all_reduce", 'the bench was in its phase "measure", at all_reduce float32 1 MiB',
    )  # fmt: skip
    assert "network" in finding.fix


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (position(1), "in all_reduce"),
        (position(1, stack=(OURS, PLUGIN)), "on its way into all_reduce"),
        (between(1), "between calls, in phase measure"),
        (between(1, phase="end"), "finished"),
        (position(1, error=PEER), f"raised {PEER}"),
        (position(0, states={"1": "T"}), "stopped"),
        (position(0, states={"1": ""}), "gone"),
        (position(0, states={"1": "Z"}, ends={"1": "SIGKILL"}), "killed by SIGKILL"),
        (position(0, states={"1": "Z"}, ends={"1": "exit status 3"}), "exit status 3"),
        (position(0, states={"1": "R"}), "did not answer"),
    ],
)
def test_a_rank_in_one_phrase(one, words):
    assert describe_rank(1, Stop(ending=Ending.HUNG, phase="measure", positions=(one,))) == words
