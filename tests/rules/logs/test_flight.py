"""Flight recorder dumps of all versions: who is behind, who differs, what cannot be told, and what runs on."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.log_facts import Operation
from ddpdoctor.rules.logs.flight import find_circle
from tests.flight_dumps import Recorder, S, recorders
from tests.golden import table
from tests.log_texts import interleaved, watchdog, work
from tests.rules.logs.truths import ABSENT, Truth, analyzed, hold


def files_of(bodies, name="nccl_trace_rank_{}", protocol=2):
    return {name.format(rank): pickle.dumps(body, protocol) for rank, body in enumerate(bodies)}


def behind(world=4, late=2, ops=20):
    """All ranks make a number of all_reduces; then all but one wait in a reduce_scatter."""
    found = recorders(world)
    for one in found:
        for _ in range(ops):
            one.call()
        if one.rank != late:
            one.call("_reduce_scatter_base", (4096,), out=(1024,), state="started", line=77)
    return found


def test_groups_of_one_name_with_other_members_are_not_compared(tmp_path):
    """Ranks 0 and 1 are in one tp group and ranks 2 and 3 in another, and both are called tp."""
    found = [Recorder(rank, 4) for rank in range(4)]
    for one in found:
        one.groups["tp"] = ("tp", [0, 1] if one.rank < 2 else [2, 3])
        for _ in range(3 if one.rank < 2 else 8):
            one.call(group="tp", size=(64 if one.rank < 2 else 128,))
        if one.rank != 2:
            one.call("_all_gather_base", (8,), group="tp", state="started", line=33)
    truth = Truth(kinds=ABSENT, ranks=(2,), says=("all_gather_into_tensor #9 of tp",))
    hold(tmp_path, files_of([one.body() for one in found]), truth)


def test_a_batch_of_transfers_has_the_state_of_its_end(tmp_path):
    """Parts of batch_isend_irecv stay scheduled for ever; the entry that ends the batch completes."""
    found = recorders(2)
    for one in found:
        one.transfer("send", 1 - one.rank, state="scheduled").transfer("recv", 1 - one.rank, state="scheduled")
        number = one.entries[0]["p2p_seq_id"]
        one.entries[1]["p2p_seq_id"] = number
        one.entries[0]["retired"] = one.entries[1]["retired"] = False
        one.transfer("send", 1 - one.rank)
        one.entries[-1] |= {"profiling_name": "nccl:coalesced", "p2p_seq_id": number}
        if one.rank == 0:
            one.call(state="started", line=90)
    hold(tmp_path, files_of([one.body() for one in found]), Truth(kinds=ABSENT, ranks=(1,), says=("all_reduce #1",)))


def test_the_helper_groups_of_detail_are_left_out(tmp_path):
    found = recorders(3)
    for one in found:
        one.groups["h"] = ("", [0, 1, 2])
        for number in range(4 + one.rank):
            one.call("all_gather", ((1, 3, 7)[number % 3],), dtype="Long", group="h", state="scheduled")
        one.call()
        if one.rank != 1:
            one.call(state="started")
    hold(tmp_path, files_of([one.body() for one in found]), Truth(kinds=ABSENT, ranks=(1,), says=("default_pg",)))


def test_dumps_of_yesterday_and_of_another_job_are_named_and_left_out(tmp_path):
    today, yesterday, other = behind(world=3, late=2), behind(world=3, late=0), behind(world=8, late=5)
    for one in [*today, other[7]]:
        for entry in one.entries:
            entry["time_created_ns"] += 20 * 3600 * 10**9
    files = {f"{one.rank}/nccl_trace_rank_{one.rank}": pickle.dumps(one.body(), 2) for one in today}
    files |= {f"old/nccl_trace_rank_{one.rank}": pickle.dumps(one.body(), 2) for one in yesterday}
    files["nccl_trace_rank_7"] = pickle.dumps(other[7].body(), 2)
    hold(tmp_path, files, Truth(kinds=ABSENT, ranks=(2,), mentions=("left out", "8 ranks", "20 h older")))


def test_a_hostile_dump_runs_nothing(tmp_path):
    victim = tmp_path / "victim"
    code = f"c__builtin__\neval\n(V__import__('os').mkdir({str(victim)!r})\ntR."
    files = files_of([one.body() for one in behind()])
    hostile = b"\x80\x02}(X\x07\0\0\0versionX\x04\0\0\x002.10X\x07\0\0\0entries" + code.encode()
    hold(tmp_path, files | {"nccl_trace_rank_4": hostile}, Truth(kinds=ABSENT, ranks=(2,), mentions=("names Python",)))
    assert not victim.exists()


def test_a_dump_that_is_cut_off_is_read_up_to_the_cut(tmp_path):
    """The last entries of rank 1 lack, so it may look behind: rank 2 is, for it has a whole dump."""
    files = files_of([one.body() for one in behind()])
    files["nccl_trace_rank_1"] = files["nccl_trace_rank_1"][:-2000]
    hold(tmp_path, files, Truth(kinds=ABSENT, ranks=(2,), mentions=("cut off",)))


def bucket_and_barrier() -> dict[str, str | bytes]:
    """Rank 0 reduces a bucket, to which no Python led; rank 1 is in the barrier after its loop."""
    frames = ["barrier from /opt/torch/distributed/distributed_c10d.py:6364", "main from /workspace/run/train.py:70"]
    stack = [f"#{at} {frame}" for at, frame in enumerate(frames)]
    logs = [watchdog(0, work(4, numel=577)), watchdog(1, work(4, numel=1), stack=stack)]
    files: dict[str, str | bytes] = {"err.txt": interleaved(*logs)}
    for rank, op in enumerate(["all_reduce", "all_reduce_barrier"]):
        recorder = Recorder(rank, 2)
        for _ in range(3):
            recorder.call(size=(577,))
        recorder.call(op, size=(577,) if rank == 0 else (1,), state="scheduled")
        for entry in recorder.entries[: 4 if rank == 0 else 3]:
            entry.update(frames=[], thread_name="pt_autograd_0")
        files[f"nccl_trace_rank_{rank}"] = pickle.dumps(recorder.body())
    return files


SIDES = {
    "log": ("err.txt", "rank 0: all_reduce #4 of default_pg of 577 elements; rank 1: barrier #4 of default_pg"),
    "dumps": (
        "nccl_trace",
        "rank 0: all_reduce #4 of default_pg of [577] float32 in backward; rank 1: barrier #4 of default_pg",
    ),
}  # fmt: skip


@pytest.mark.parametrize("given", ["log", "dumps", "both"])
def test_each_side_is_named_once_and_by_what_made_it(tmp_path, given):
    begins, sides = SIDES["dumps" if given == "both" else given]
    files = bucket_and_barrier()
    kept = {name: content for name, content in files.items() if given == "both" or name.startswith(begins)}
    report = hold(tmp_path, kept, Truth(kinds=("mismatch",), ranks=(0, 1), confidence=("medium",)))
    assert report.verdict is not None
    assert report.verdict.summary == f"the ranks made different calls: {sides}"
    assert "they differ in: operation" in report.verdict.evidence


def came_late(late_s, ahead_s, seen_s, version):
    """Rank 1 made #6 so late, by a clock that is so far ahead; the others had waited for so long. All complete #6 and #7."""
    found = recorders(3)
    for one in found:
        one.now_ns += ahead_s * S * (one.rank == 1)
        for _ in range(5):
            one.call()
        one.now_ns += late_s * S * (one.rank == 1)
        one.call().call()
        if one.rank != 1:
            one.entries[5]["time_discovered_completed_ns"] += seen_s * S
        else:
            one.call(state="scheduled", line=77)
    return of_files(files_of([one.body(version) for one in found]))


def calls(
    world, *made, groups=None, backend=None, form="body", name="nccl_trace_rank_{}", given=None, ring=2000, version=None
):
    """Analyze the dumps of ranks that made these calls, each on the ranks before it: (ranks, name, arguments)."""
    found = recorders(world, groups)
    for one in found:
        one.backend = backend or one.backend
        for ranks, act, args, more in made:
            if one.rank in ranks:
                getattr(one, act)(*args, **more)
    bodies = [one.body(version) if version else getattr(one, form)() for one in found]
    for one in bodies:
        if "entries" in one:
            one["entries"] = one["entries"][-ring:]
    if form == "json":
        files = {name.format(rank): json.dumps(body).encode() for rank, body in enumerate(bodies)}
    else:
        files = files_of(bodies, name, 2 if form == "body" else 4)
    files = {file: files[file] for rank, file in enumerate(files) if given is None or rank in given}
    return of_files(files)


def of_files(files):
    with TemporaryDirectory() as folder:
        report = analyzed(Path(folder), files)
    texts = [tuple(text.removeprefix(f"{folder}/evidence/") for text in one.evidence) for one in report.findings]
    findings = tuple(replace(one, evidence=text) for one, text in zip(report.findings, texts, strict=True))
    return replace(report, findings=findings)


def call(ranks, *args, **more):
    return ranks, "call", args, more


def transfer(rank, *args, **more):
    return (rank,), "transfer", args, more


def circle(*links):
    """Return the ranks that wait for each other, of pairs of a rank and the one it waits for."""
    found = find_circle((rank, Operation(op="recv"), other) for rank, other in links)
    return found and tuple(rank for rank, *_ in found.links)


def status(report):
    unknown = [str(check.reason) for check in report.checks if check.outcome is Outcome.INCONCLUSIVE]
    return "; ".join((report.exit_status(Severity.ERROR).name, *(() if report.verdict else unknown)))


test_rows = table("flight", "ddpdoctor.rules.logs.calls ddpdoctor.model.log_facts", globals(), head=status)
