"""Who started a process as which rank of which job, on one node and several."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ddpdoctor.collect import proc
from ddpdoctor.collect.launch import effective_environment, read_node_launch, seen_launch, seen_ranks
from ddpdoctor.collect.live import _passes_of, find_record, find_runs, is_watched, read_live
from ddpdoctor.collect.recorded import read_first_step
from ddpdoctor.collect.run import (
    BEATS_NS,
    NotThere,
    SavedRun,
    _took_part,
    attempt_elsewhere,
    came_later,
    read_job,
    was_gone,
)
from ddpdoctor.collect.run_files import WorkerStart, parse_watch, read_entries, save
from ddpdoctor.collect.run_ranks import find_ranks, is_on_one_host
from ddpdoctor.diagnose.job import judge_folder
from ddpdoctor.launch.evidence import ANSWER_LIMIT_S, PATIENT_LIMIT_S, Followed, ask_for_evidence
from ddpdoctor.model.data import EpochSeen, LoaderSeen
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import RECORD_NAME, NodeSeen, NodesSeen, Presence, RecordPlace, Run
from ddpdoctor.model.launch import Launch, NodeOptions
from ddpdoctor.model.node import Launcher
from ddpdoctor.recorder.storage.ring_layout import CELL_NAMES, CONTROL_DUMPED, ROLE_CHILD, ROLE_RANK
from ddpdoctor.recorder.storage.ring_reading import RingContent
from tests.golden import Cases, table, words
from tests.scenarios.running import wait_for
from tests.synthetic import SITUATIONS, Job, S, new_taker, write_folder, write_gathered

# A launcher is seen by what it alone sets; variables that anybody may set are no launch.


CASES = Cases(__name__)
test_kept = CASES.test()
ENV = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
TORCHRUN = {
    **ENV, "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_WORLD_SIZE": "2",
}  # fmt: skip
STEP = {
    "SLURM_JOB_ID": "1000", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[4-5]",
    "SLURM_JOB_NODELIST": "n[1-8]", "SLURM_NTASKS": "64",
}  # fmt: skip
SALLOC_SHELL = {
    "SLURM_JOB_ID": "3", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
BATCH_SHELL = {**SALLOC_SHELL, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}


OWN = {**ENV, "MASTER_ADDR": "127.0.0.1", "DDPDOCTOR_RANKS": "4711"}


def launched(env, **options):
    """Return the launch that is seen, and whether it gathers its nodes."""
    launch = seen_launch(env, **options)
    return [launch, f"gathers: {launch.gathers}"]


def test_ranks_are_seen_where_their_launch_is():
    assert (seen_ranks(TORCHRUN), seen_ranks(STEP)) == (seen_launch(TORCHRUN), seen_launch(STEP))


def test_the_port_of_a_step_is_below_those_that_linux_hands_out():
    ports = {seen_launch({**STEP, "SLURM_JOB_ID": str(job)}).port for job in range(0, 10**6, 997)}
    assert min(ports) >= 16384
    assert max(ports) < 32768
    assert seen_launch(STEP).port != seen_launch({**STEP, "SLURM_STEP_ID": "3"}).port


NONE = [
    {}, ENV, SALLOC_SHELL, BATCH_SHELL, {**BATCH_SHELL, "SLURM_STEP_ID": "4294967291"},
    {**STEP, "SLURM_STEP_ID": "4294967290"}, {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    {**STEP, "SLURM_PROCID": "8"}, {**TORCHRUN, "RANK": "-1"}, {**TORCHRUN, "RANK": "4"},
    {**TORCHRUN, "WORLD_SIZE": "four"}, {**TORCHRUN, "MASTER_ADDR": ""},
]  # fmt: skip


def test_no_launcher_and_a_rank_that_does_not_know_all_is_none():
    assert [(seen_launch(env), seen_launch(env).gathers) for env in NONE] == [(Launch(), False)] * len(NONE)
    for missing in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env = {name: value for name, value in OWN.items() if name != missing}
        assert seen_ranks(env).launcher is Launcher.NONE


def test_on_one_host_the_rank_is_the_number_on_the_host_unless_it_is_given():
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    given = ({}, {"LOCAL_RANK": "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, BATCH_SHELL, STEP, {"MASTER_ADDR": "n0"})
    assert [seen_ranks(env | more).local_rank for more in given] == [3, 1, 2, 3, 1, None]


# Who a node is among others, by options, torchrun, Slurm and operators.


TORCHRUN_NODE_LAUNCHES = {
    "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5", "WORLD_SIZE": "8",
    "LOCAL_RANK": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500",
}  # fmt: skip
STEP_NODE_LAUNCHES = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[4-5]",
}  # fmt: skip


def read(env=None, **options):
    return read_node_launch(effective_environment(env or {}, NodeOptions(**options)))


PODS = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
OPERATOR = {
    "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_NNODES": "2", "PET_RDZV_ID": "j",
    "PET_NPROC_PER_NODE": "4",
}  # fmt: skip
ONE_HOST = {"MASTER_ADDR": "n0", "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_options_overrule_what_they_stand_for():
    env = {"MASTER_ADDR": "old", "MASTER_PORT": "1", "PET_RDZV_ENDPOINT": "old:2", "NCCL_DEBUG": "INFO"}
    effective = effective_environment(env, NodeOptions(nnodes="2", node_rank=0, master_addr="n0"))
    assert effective == {"NCCL_DEBUG": "INFO", "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "n0"}


def refused(ask, *given, **options):
    with pytest.raises(UserError) as error:
        ask(*given, **options)
    return f"{error.value} (status {error.value.status})"


test_rows = table("starts", globals())


# Which processes stand for ranks, under every kind of launcher.


def ring(pid, *, ppid=1, began=10, joined=None, world=2, of=0, left=None, role=ROLE_RANK, **env):
    process = {"k": "process", "ppid": ppid, "rank_pid": of, "env": {name: str(value) for name, value in env.items()}}
    notes = [process]
    notes += [{"k": "initialized", "rank": joined, "world_size": world}] if joined is not None else []
    notes += [{"k": "destroyed", "at": left}] if left is not None else []
    fields = dict.fromkeys(RingContent._fields, None)
    fields.update(role=role, pid=pid, start_ticks=1, cells=dict.fromkeys(CELL_NAMES, 0) | {"started_ns": began},
                  notes=notes, slots=[])  # fmt: skip
    return RingContent(**fields)


def found(*rings, started=None, watched=None, until=None):
    contents = {content.pid: content for content in rings}
    sources = find_ranks(started or {}, contents, parse_watch({"processes": watched or {}}), until)
    return sorted(
        f"{source.rank}: {source.pid}" + (f" for {source.stands_for}" if source.stands_for else "")
        for source in sources
    )


TABLE = Path(__file__).parents[2] / "data" / "ranks.txt"


def processes_of(part):
    """Return the agent's workers, the rings and what was watched of a case of the table, and what is expected of it."""
    rings, agent, watched, expected = [], None, {}, []
    for line in part.split("\n")[1:]:
        first, *words = line.split()
        if first == "=>":
            expected = line[3:].split(", ")
        elif first == "agent":
            agent = [int(word) for word in words if word.isdigit()]
        elif first == "watched":
            watched[words[0]] = json.loads(line.split(maxsplit=2)[2])
        else:
            given = dict(word.split("=") for word in words)
            role = ROLE_CHILD if given.pop("role", "") else ROLE_RANK
            rings.append(ring(int(first), role=role, **{name: int(value) for name, value in given.items()}))
    return rings, agent, watched, expected


def ring_with_world(content):
    """Return a rank whose launcher told it the size of the world, as those that give numbers do."""
    process, *rest = content.notes
    return content._replace(notes=[{**process, "env": {**process["env"], "WORLD_SIZE": "2"}}, *rest])


def parts():
    lines = [line for line in TABLE.read_text().split("\n") if line and not line.startswith("#")]
    return "\n".join(lines).removeprefix("==== ").split("\n==== ")


@pytest.mark.parametrize("part", parts(), ids=lambda part: part.partition("\n")[0])
def test_processes_that_stand_for_ranks(part):
    """What is below a rank is a rank only if it took over, with an agent or without."""
    rings, agent, watched, expected = processes_of(part)
    common = {"world_size": 2, "at": 5}
    started = {pid: WorkerStart(pid=pid, rank=n, local_rank=n, **common) for n, pid in enumerate(agent or ())}
    assert found(*rings, started=started, watched=watched, until=50) == expected
    if "or numbered" in part:
        numbered = found(*map(ring_with_world, rings[:2]), *rings[2:])
        assert numbered == [one.partition(" for ")[0] for one in expected]


def test_some_launchers_say_that_all_ranks_are_on_this_host():
    of_mpi = {"OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_SIZE": 4}
    here = [{"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}, of_mpi, {"SLURM_PROCID": 0, "SLURM_NNODES": 1}]
    elsewhere = [{**of_mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": 2}, {"SLURM_PROCID": 0, "SLURM_NNODES": 2}]
    unknown = [{"RANK": 0, "WORLD_SIZE": 2}, {}]
    assert [is_on_one_host([ring(20, **env)]) for env in (*here, *elsewhere, *unknown)] == [True] * 3 + [False] * 4


# Where the record of a running job is, and what is asked of its watcher.


HERE = os.uname().nodename


def make_run(folder, **changes):
    folder.mkdir(parents=True)
    body = {"format": "ddpdoctor-run", "version": 1, "host": HERE, **changes}
    (folder / "run.json").write_text(json.dumps(body))
    return folder


def test_a_record_on_a_local_disk_is_found_from_the_run_folder_on_that_host_only(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    local = make_run(tmp_path / "local", run_dir=str(run))
    for folder in (run, other):
        folder.mkdir()
        save(folder / RECORD_NAME, RecordPlace(host=HERE, folder=str(local)))
    assert find_record(run, HERE) == local
    assert find_record(run, "another") == run
    assert read_live(run).folder == local
    assert find_record(other, HERE) == other  # it comes from elsewhere: the record is not of its run
    save(run / RECORD_NAME, RecordPlace(host=HERE, folder=str(tmp_path / "gone")))
    assert find_record(run, HERE) == run


def test_the_watcher_is_known_by_its_pid_and_start():
    own = proc.read_process(os.getpid())
    assert is_watched(Run(watcher_pid=own.pid, watcher_ticks=own.start_ticks))
    assert not is_watched(Run(watcher_pid=own.pid, watcher_ticks=own.start_ticks + 1))
    assert is_watched(Run())  # of an older version it is not known


def test_members_that_record_in_one_place_are_known_at_once_and_on_a_further_node_its_own_is_shown(tmp_path):
    run = make_run(tmp_path / "run")
    make_run(run / "nodes" / "1", node_rank=1)
    assert [(node.number, node.host) for node in read_live(run).members.nodes] == [(0, HERE), (1, HERE)]
    base = tmp_path / "base"
    make_run(base / "nodes" / "1", host="another", node_rank=1)
    own = make_run(base / "nodes" / "2", node_rank=2)
    assert read_live(base).folder == own


def test_a_damaged_note_costs_only_what_it_says_and_a_damaged_folder_is_refused(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("members.json", "replicas.json", "record.json", "end.json", "watch.json"):
        (run / name).write_text('{"nodes": 3')
    seen = read_live(run)
    assert (seen.members, seen.replicas, seen.end, seen.job.ranks) == (None, None, None, ())
    for text in ("", "[]", "{", '{"format": "ddpdoctor-run", "version": 1, "nproc": "x"}'):
        (run / "run.json").write_text(text)
        with pytest.raises(UserError):
            read_live(run)


def test_evidence_is_asked_for_once_and_answered_once(tmp_path):
    taker = new_taker(tmp_path)
    assert taker.dump_asked() == 0
    came = []
    asking = threading.Thread(target=lambda: came.append(ask_for_evidence(tmp_path, 100, lambda: True)))
    asking.start()
    assert wait_for(taker.dump_asked)
    taker.set_control(CONTROL_DUMPED, taker.dump_asked())
    asking.join()
    assert (came, taker.dump_asked()) == ([True], 0)


@pytest.mark.parametrize(("limit_s", "answered"), [(PATIENT_LIMIT_S, True), (ANSWER_LIMIT_S, False)])
def test_a_recorder_whose_heartbeat_is_late_is_waited_for_where_there_is_time(tmp_path, monkeypatch, limit_s, answered):
    """On a busy machine a heartbeat can be two seconds late, and the line at fault came with the answer."""
    taker, own = new_taker(tmp_path), proc.read_process(os.getpid())
    late = Followed(pid=own.pid, ticks=own.start_ticks, role=ROLE_RANK, ring=None, heartbeat_changed_ns=8 * S_PAST)
    answer = tmp_path / "evidence" / f"{own.pid}-{own.start_ticks}-1.json"
    monkeypatch.setattr(time, "monotonic_ns", lambda: 10 * S_PAST)
    monkeypatch.setattr(time, "sleep", lambda _: answer.write_text('{"complete": true}'))
    taker.take({own.pid: late}, lambda: None, keep_rings=False, limit_s=limit_s)
    assert answer.exists() is answered


def test_nobody_answers_for_a_watcher_that_is_gone_or_too_slow(tmp_path):
    new_taker(tmp_path)
    assert not ask_for_evidence(tmp_path, 100, lambda: False)
    assert not ask_for_evidence(tmp_path, 0.1, lambda: True)


# How far the starts of a job came, and where their run folders are.


S_PAST = 1_000_000_000


def content(kept, last, started_ns=5 * S_PAST):
    """Make the part of a ring that is read: numbers and ends of steps, by column."""
    columns = [[list(column) for column in zip(*rows, strict=True)] for rows in (kept, last)]
    return SimpleNamespace(kept=columns[0], steps=columns[1], cells={"started_ns": started_ns})


def seen_past(number, epoch, batches=4, *, trained=True):
    return EpochSeen(
        number=number, set_epoch=epoch, batches=batches, drawn=16, total=0, xor=0, order="", first="", complete=True,
        trained=trained, backwards=batches,
    )  # fmt: skip


def loader(*epochs, trained_batches=0):
    return LoaderSeen(
        number=1, site=None, dataset="", dataset_digest="", samples=64, batch_size=4, drop_last=False, iterable=False,
        workers=0, indices_seen=True, sampler=None, epochs=epochs, passes=len(epochs),
        trained_batches=trained_batches or sum(one.batches for one in epochs),
    )  # fmt: skip


def test_passes_have_their_epochs_and_steps():
    """A step may take several batches. Passes before a gap are left out but for the first epoch."""

    def passes(*epochs, steps, trained=0):
        found, first = _passes_of(loader(*(seen_past(*one) for one in epochs), trained_batches=trained), steps)
        return [(one.epoch, one.steps) for one in found], first

    assert passes((1, 2), (2, 3), steps=8) == ([(2, 4), (3, 4)], 2)
    assert passes((1, 0), (2, 1), steps=2)[0] == [(0, 1), (1, 1)]
    assert passes((1, 0), (2, 1), (9, 8), (10, 9), steps=40, trained=40) == ([(8, 4), (9, 4)], 0)
    assert passes((1, 0), (2, 0), steps=8)[1] is None


def make(folder, mark="run.json", text="{}"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mark).write_text(text)
    return folder


def test_run_folders_are_found_below_a_folder_but_not_their_parts(tmp_path):
    wanted = [make(tmp_path / name) for name in ("a", "a/restart-1", "b/c")]
    reported = make(tmp_path / "d", "report.json")
    for part in ("a/dumps/1", "a/nodes/1", "a/gathered/1"):
        make(tmp_path / part, "report.json")
    make(tmp_path / "1/2/3/4")
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    assert find_runs(tmp_path) == [*wanted, reported]
    assert find_runs(wanted[0]) == wanted[:2]


def test_of_several_members_the_first_counts_and_without_it_the_others(tmp_path):
    first = make(tmp_path / "train", text='{"node_rank": 0}')
    second = make(tmp_path / "train-node-1", text='{"node_rank": 1}')
    assert find_runs(tmp_path) == [first]
    (first / "run.json").unlink()
    assert find_runs(tmp_path) == [second]


# Attempts of several nodes are the same where their agents met: each node counts its own.


def log(folder, *meetings, at=9):
    """Return the log of a node whose attempts 0, 1, ... came from these meetings, as it is written and read."""
    folder.mkdir()
    common = {"k": "rank", "local_rank": 0, "rank": 0, "pid": 5, "world_size": 2, "at": at}
    rows = [{**common, "attempt": number, "meeting": meeting} for number, meeting in enumerate(meetings)]
    (folder / "agent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_entries(folder / "agent.jsonl")


ATTEMPTS = [
    # meetings of the attempts of a node and of another one, and the attempt that is asked for
    ((0, 1), (0, 1), None), ((0, 1), (0, 1), 0), ((0, 1), (1,), None), ((0, 1, 2), (1, 2), 1), ((1,), (0, 1, 2), None),
    ((None, None), (None, None), 0), ((None,), (), None), ((0,), (None,), 0), ((0, 1), (1,), 0), ((0, 1), (1,), 1),
    ((0, 1, 2), (0, 1), None), ((0,), (), None), ((0, 1), (0,), None), ((0,), (), 0),
]  # fmt: skip


@CASES
def attempts_of_another_node(tmp_path):
    """One that never started ranks is read as it is. Who was last heard before an attempt is no part of it.

    Who joined later is no part of what was before. It may have died in the last one before it could send its log.
    """
    told = {}
    for number, (own, other, attempt) in enumerate(ATTEMPTS):
        (tmp_path / str(number)).mkdir()
        logs = log(tmp_path / str(number) / "own", *own), log(tmp_path / str(number) / "other", *other)
        try:
            there = attempt_elsewhere(*logs, attempt)
        except NotThere:
            there = "not there"
        told[f"{own}, {other}, {attempt}"] = f"attempt {there}, came later: {came_later(*logs, attempt)}"
    for number, (meetings, heard_ns) in enumerate(
        (((0, 1), 0), ((0, 1), BEATS_NS), ((0, 1), None), ((None,), 0), ((), 0))
    ):
        own = log(tmp_path / f"heard {number}", *meetings, at=BEATS_NS + 5)
        told[f"{meetings}, heard {heard_ns}"] = f"gone: {was_gone(own, heard_ns, None)}"
    return told


@pytest.mark.parametrize(
    ("others", "took_part"),
    [
        ([(0, (1,))], True),  # a static rendezvous starts again without it, and rank 1 is missing
        ([(0, (2,)), (BEATS_NS + 9, (1,))], False),  # an elastic job goes on without it
        ([(0, (1,)), (BEATS_NS + 9, ())], False),
    ],
)
def test_a_lost_node_whose_ranks_an_attempt_waits_for_is_part_of_it(tmp_path, others, *, took_part):
    own = SimpleNamespace(agent=log(tmp_path / "own", 0, 1, at=BEATS_NS + 5))
    saved = cast("SavedRun", SimpleNamespace(own=own, others={}))
    found = [(BEATS_NS + 9, ()), *others]
    nodes = tuple(
        NodeSeen(number=number, host="h", presence=Presence.HERE, heard_ns=heard_ns, ranks=ranks)
        for number, (heard_ns, ranks) in enumerate(found)
    )
    members = NodesSeen(expected=2, own=0, nodes=nodes)
    assert _took_part(saved, nodes[1], members, None) is took_part


def test_a_node_that_joined_later_is_in_the_second_attempt_of_the_first(tmp_path):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="healthy"), 2)
    for folder, before in ((tmp_path, 1), (tmp_path / "nodes" / "1", 0)):
        rows = [json.loads(line) for line in (folder / "agent.jsonl").read_text().splitlines()]
        later = [row | {"attempt": before, "meeting": 1} for row in rows]
        earlier = [row | {"pid": row["pid"] + 50, "meeting": 0, "world_size": 2} for row in rows] if before else []
        (folder / "agent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in earlier + later))
    last, first = read_job(tmp_path), read_job(tmp_path, 0)
    assert [(rank.rank, rank.host, rank.attempt) for rank in last.ranks] == [
        (0, "node0", 1), (1, "node0", 1), (2, "node1", 1), (3, "node1", 1)
    ]  # fmt: skip
    assert [(rank.rank, rank.host, rank.attempt) for rank in first.ranks] == [(0, "node0", 0), (1, "node0", 0)]
    assert first.members is not None
    assert [node.number for node in first.members.nodes] == [0]


# A job of several nodes is read from the folder of the first as if all its ranks had been there.


HOUR = 3600 * S


def named(judgment):
    return [(finding.kind, finding.ranks) for finding in judgment.findings]


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("situation", SITUATIONS)
def test_nodes_whose_clocks_are_hours_apart_are_judged_as_one_host(tmp_path, situation):
    job = Job(world=16, steps=10, situation=situation, culprit=9)
    write_folder(tmp_path / "one", job)
    write_gathered(tmp_path / "four", job, 4, skew_ns=HOUR)
    assert named(judge_folder(tmp_path / "four")) == named(judge_folder(tmp_path / "one"))


def test_times_are_those_of_the_first_node(tmp_path):
    job = Job(world=4, steps=20, situation="stuck")
    write_folder(tmp_path / "one", job)
    write_gathered(tmp_path / "two", job, 2, skew_ns=HOUR)
    one, two = read_job(tmp_path / "one"), read_job(tmp_path / "two")
    assert [rank.started_ns for rank in two.ranks] == [rank.started_ns for rank in one.ranks]
    assert [rank.last_progress_ns for rank in two.ranks] == [rank.last_progress_ns for rank in one.ranks]
    assert [rank.host for rank in two.ranks] == ["node0", "node0", "node1", "node1"]
    assert two.nnodes == 2
    assert [seen.host for seen in two.elsewhere] == ["node1"]


def test_what_a_node_recorded_in_a_shared_folder_counts_where_it_sent_nothing(tmp_path):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="stuck"), 2)
    shutil.copytree(tmp_path / "nodes" / "1", tmp_path / "gathered" / "1")
    change(tmp_path / "gathered" / "1" / "run.json", host="sent")
    assert [seen.host for seen in read_job(tmp_path).elsewhere] == ["sent"]
    shutil.rmtree(tmp_path / "gathered")
    assert [seen.host for seen in read_job(tmp_path).elsewhere] == ["node1"]


def test_a_node_whose_records_cannot_be_read_is_not_there_and_without_a_list_of_nodes_the_first_is_alone(tmp_path):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="stuck"), 2)
    for damage in ("{", "[]", '{"format": "other"}'):
        (tmp_path / "nodes" / "1" / "run.json").write_text(damage)
        job = read_job(tmp_path)
        assert [rank.rank for rank in job.ranks] == [0, 1]
        assert [node.gathered for node in job.members.nodes] == [True, False]
    for text in ("", "{", "[]", '{"expected": "x"}'):
        (tmp_path / "nodes.json").write_text(text)
        assert read_job(tmp_path).members is None


def test_the_stop_of_any_node_is_that_of_the_job(tmp_path):
    """A rank of the first node that ends after another node's launcher began to stop the job is no cause."""
    write_gathered(tmp_path, Job(world=4, steps=20, situation="crash", culprit=2), 2, skew_ns=HOUR)
    other = tmp_path / "nodes" / "1" / "watch.json"
    ended_ns = min(row["ended_ns"] for row in json.loads(other.read_text())["processes"].values())
    change(other, stopping_since_ns=ended_ns - 10 * S)
    job = read_job(tmp_path)
    assert job.stopping_since_ns == ended_ns - 10 * S - HOUR
    assert all(rank.after_stop for rank in job.ranks)


def test_a_node_that_left_badly_makes_a_failed_job(tmp_path):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="healthy"), 2)
    first, other = json.loads((tmp_path / "nodes.json").read_text())["nodes"]
    change(tmp_path / "nodes.json", nodes=[first, other | {"presence": "left", "status": 3}])
    assert read_job(tmp_path).launcher_status == 3


def first_step(row):
    found = read_first_step(content(*([(number, at * S_PAST) for number, at in rows] for rows in row)))
    return None if found is None else f"{found / S_PAST} s"


test_words = words(__name__, first_step=first_step)
