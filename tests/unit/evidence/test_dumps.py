"""Stacks, dumps of flight recorders and attached looks as evidence."""

import json
import pickle
import random
import struct
from dataclasses import replace
from typing import Any

import pytest

from ddpdoctor.attach.session import save_nodes
from ddpdoctor.diagnose.evidence import analyze
from ddpdoctor.evidence.flight import FlightJsonReader, FlightPickleReader
from ddpdoctor.evidence.reader import Document
from ddpdoctor.evidence.reading import choose_dumps
from ddpdoctor.evidence.stacks import JsonStackReader, StackReader
from ddpdoctor.model.attached import (
    AskedNodes,
    AttachedJob,
    JobIdentity,
    Movement,
    NodeAnswer,
    ProcessFacts,
    RankLook,
    Refusal,
)
from ddpdoctor.model.codec import encode
from ddpdoctor.model.evidence import Stacked, Who
from ddpdoctor.rules.evidence.flight import compare_flight
from tests.flight_dumps import recorders
from tests.unit.attach.test_asked import seen_rank

# Stacks in every format: whose they are, which thread counts, and what it does.


def test_json_of_py_spy() -> None:
    frame = {"name": "lookup", "filename": "/home/u/cache.py", "module": None, "short_filename": "cache.py", "line": 31}
    thread = {"pid": 9, "thread_id": 1, "os_thread_id": 9, "active": True, "owns_gil": True, "frames": [frame]}
    body = json.dumps([{**thread, "thread_name": "MainThread"}]).encode()
    reader = JsonStackReader()
    assert reader.recognizes(body)
    (stack,) = reader.read(Document(source="s", path=None, body=body, who=Who(rank=1))).facts
    assert isinstance(stack, Stacked)
    assert (stack.who, stack.state, stack.frames[0].file) == (Who(rank=1, pid=9), "active+gil", "/home/u/cache.py")
    assert reader.read(Document(source="s", path=None, body=body[:-9])).problem.startswith("damaged")


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-09 14:02:11 INFO train: step 1 loss 4.1538\n" * 30,
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x()\nValueError: no\n',
        '[{"loss": 3}]',
        "",
    ],
)  # fmt: skip
def test_logs_are_no_stacks(text: str) -> None:
    assert not StackReader().recognizes(text.encode())
    assert not JsonStackReader().recognizes(text.encode())


# Dumps of the flight recorder may come from anybody: none raises an error, runs code or takes all memory.


ODD: tuple[Any, ...] = (
    None, True, -1, 2**40, 2**70, 1.5, float("nan"), "", "[0, 1]", [], [[1]], ["a"], {}, {"a": 1}, (), ("0", 1), b"x",
    [[2**70, 2**70]], [["a"]],
)  # fmt: skip


def read_flight(body, name="nccl_trace_rank_0"):
    raw = body if isinstance(body, bytes) else pickle.dumps(body, 2)
    return FlightPickleReader().read(Document(source=name, path=None, body=raw))


def bodies():
    found = recorders(3, {"1/tp": [0, 1]})
    for one in found:
        for _ in range(5):
            one.call()
        if one.rank < 2:
            one.call(group="1/tp").transfer("recv" if one.rank else "send", 1 - one.rank, group="1/tp")
        if one.rank:
            one.call(state="started")
    return [one.body() for one in found]


def spoiled(value, chance, chosen):
    """Return a value of which some parts are replaced, lost or renamed."""
    if chosen.random() < chance:
        return chosen.choice(ODD)
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if chosen.random() > chance / 3}
        return {key: spoiled(one, chance, chosen) for key, one in kept.items()}
    if isinstance(value, list | tuple):
        return type(value)(spoiled(one, chance, chosen) for one in value)
    return value


@pytest.mark.parametrize("chance", [0.002, 0.01, 0.05, 0.2])
def test_a_spoiled_dump_raises_nothing(chance):
    chosen = random.Random(chance)
    whole = bodies()
    for _ in range(100):
        dumps = []
        for rank, body in enumerate(whole):
            raw = pickle.dumps(spoiled(body, chance, chosen), 2)
            cut = raw[: chosen.randrange(len(raw))] if chosen.random() < 0.2 else raw
            dumps += read_flight(cut, f"nccl_trace_rank_{rank}").dumps
        kept, _ = choose_dumps(dumps)
        compare_flight(kept, chosen.choice([None, 3, 4]))


def test_one_opcode_cannot_take_all_memory():
    """LONG_BINPUT with a large index makes CPython's unpickler allocate 64 GiB at once."""
    whole = pickle.dumps(bodies()[0], 2)
    bomb = whole[:2] + b"]r" + struct.pack("<I", 2**32 - 2) + b"0" + whole[2:]
    found = read_flight(bomb)
    assert found.problem.startswith("damaged")


def test_a_rank_comes_from_the_name_or_from_its_transfers():
    body = bodies()[1]
    assert read_flight(body, "fr_7").dumps[0].rank == 7
    assert read_flight(body, "dump").dumps[0].rank == 1


@pytest.mark.parametrize(
    ("head", "is_dump"),
    [(b'{"version": "2.10", "entries": []}', True), (b'{"version": "1", "name": "x"}', False), (b"[1]", False)],
)
def test_json_is_a_dump_if_it_has_the_keys_of_one(head, is_dump):
    assert FlightJsonReader().recognizes(head) is is_dump


def test_a_pickle_of_something_else_is_no_dump():
    assert not FlightPickleReader().recognizes(pickle.dumps({"version": 1, "state_dict": {}}, 2))


# What `analyze` says of folders that `attach` saved, where a source was refused or a node was not reached.


NO_PY_SPY = Refusal(source="py-spy", reason="py-spy is not installed", remedy="pip install 'ddpdoctor[attach]'")
WAITING, AT_FAULT = ("all_reduce", "/venv/torch/distributed/distributed_c10d.py"), ("fetch", "/home/me/train.py")
IDENTITY = JobIdentity(name="job", master_addr="n1", master_port=29500)


def process(letter):
    return ProcessFacts(
        state=letter, cpu_ticks=9, main_cpu_ticks=5, main_switches=7, threads=(), blocked=None, kernel_function=None,
        peers=(), children=(),
    )  # fmt: skip


def stacks(function, file):
    frames = [
        {"name": function, "filename": file, "line": 30}, {"name": "main", "filename": "/home/me/train.py", "line": 50}
    ]  # fmt: skip
    return [{"pid": 1, "thread_name": "MainThread", "os_thread_id": 1, "active": False, "frames": frames}]


def save(folder, host, ranks, *, identity=IDENTITY, wall_ns=10**18, world_size=4, restart_count=0, stopped=()):
    """Save a folder of ``attach``; ``ranks`` are the stacks, or the refusal, of each rank."""
    folder.mkdir(parents=True)
    known = {"world_size": world_size, "restart_count": restart_count}
    seen = {rank: replace(seen_rank(100 + rank, rank), **known) for rank in ranks}
    for number in (1, 2):
        (folder / f"look_{number}").mkdir()
        for rank, what in ranks.items():
            refused = isinstance(what, Refusal)
            look = RankLook(
                number=number, host=host, wall_ns=wall_ns, monotonic_ns=number, job=identity, rank=seen[rank],
                process=process("T" if rank in stopped else "S"), stacks=None if refused else stacks(*what), refused=(what,) if refused else (),
            )  # fmt: skip
            (folder / f"look_{number}" / f"rank_{rank}_pid_{100 + rank}.json").write_text(json.dumps(encode(look)))
    job = AttachedJob(
        host=host, wall_ns=wall_ns, job=identity, world_size=world_size, ranks=tuple(seen.values()), looks=2,
        gap_s=3.0, movement=Movement.STILL, movements=(), refused=(), files=(),
    )  # fmt: skip
    (folder / "attach.json").write_text(json.dumps(encode(job)))
    return folder


def about(*folders):
    report = analyze([str(folder) for folder in folders], (), "2026-01-01T00:00:00")
    return report, report.data["evidence"]


def test_what_is_refused_for_all_ranks_is_said_once_with_what_to_do(tmp_path):
    report, evidence = about(save(tmp_path / "n1", "n1", dict.fromkeys(range(4), NO_PY_SPY)))
    assert report.verdict is None
    assert evidence["notes"] == ["py-spy of ranks 0-3: py-spy is not installed; pip install 'ddpdoctor[attach]'"]
    assert evidence["unclear"] == "there is no sign of progress, and no stack of a rank was seen"
    assert evidence["collect"] == ["pip install 'ddpdoctor[attach]'"]


def test_ranks_that_were_seen_and_do_not_wait_are_to_be_looked_at_again(tmp_path):
    _, evidence = about(save(tmp_path / "n1", "n1", dict.fromkeys(range(4), AT_FAULT)))
    assert evidence["unclear"] == "there is no sign of progress, and no rank was seen to wait for another"
    again, ask = evidence["collect"]
    assert again.startswith("check again in a minute")
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in ask


def test_a_node_that_sent_nothing_is_named_with_what_to_do(tmp_path):
    save(tmp_path / "n1", "n1", {0: WAITING, 1: WAITING})
    nodes = (
        NodeAnswer(node="n1", folder="n1"),
        NodeAnswer(node="n2", folder="", reason="no answer", remedy="see NODE"),
    )
    save_nodes(tmp_path, AskedNodes(wall_ns=10**18, asked_by="srun", nodes=nodes))
    report, evidence = about(tmp_path)
    assert report.verdict is None
    assert evidence["notes"] == ["n2: no answer; see n2"]
    assert evidence["collect"][0] == "see n2"
    assert "ranks 2 and 3" in evidence["collect"][1]


def test_if_all_nodes_sent_what_they_saw_nothing_is_noted(tmp_path):
    save(tmp_path / "n1", "n1", {0: WAITING, 1: WAITING})
    save(tmp_path / "n2", "n2", {2: WAITING, 3: AT_FAULT})
    nodes = tuple(NodeAnswer(node=name, folder=name) for name in ("n1", "n2"))
    save_nodes(tmp_path, AskedNodes(wall_ns=10**18, asked_by="srun", nodes=nodes))
    report, evidence = about(tmp_path)
    assert (report.verdict.code, report.verdict.ranks, report.verdict.hosts) == ("DD601", (3,), ("n2",))
    assert (evidence["notes"], evidence["collect"]) == ([], [])


def test_the_job_is_shown_with_its_launcher_and_hosts(tmp_path):
    save(tmp_path / "a", "n1", {0: WAITING, 1: WAITING})
    save(tmp_path / "b", "n2", {2: WAITING, 3: AT_FAULT})
    _, evidence = about(tmp_path)
    assert evidence["job"] == "job, torchrun, 4 ranks on n1 and n2"


@pytest.mark.parametrize(
    ("others", "confidence"), [(WAITING, "high"), (NO_PY_SPY, "medium")], ids=["seen to wait", "without stacks"]
)
def test_a_stopped_rank_among_others(tmp_path, others, confidence):
    report, _ = about(save(tmp_path / "n1", "n1", dict.fromkeys(range(4), others), stopped=(3,)))
    assert (report.verdict.code, report.verdict.ranks, report.verdict.confidence.value) == ("DD606", (3,), confidence)
    assert "`kill -CONT 103` on n1" in report.verdict.fix


def left_out(evidence):
    return {one["source"]: one["left_out"] for one in evidence["sources"] if one["left_out"]}


def test_folders_of_several_nodes_are_one_job(tmp_path):
    """Also if they have one host name, and if another job of this name runs on one of them."""
    save(tmp_path / "a", "localhost", {0: WAITING, 1: WAITING})
    longer = replace(IDENTITY, name="job@29500")
    save(tmp_path / "b", "localhost", {2: WAITING, 3: AT_FAULT}, identity=longer, wall_ns=10**18 + 10**12)
    report, evidence = about(tmp_path / "a", tmp_path / "b")
    assert (report.verdict.code, report.verdict.ranks) == ("DD601", (3,))
    assert (evidence["seen_ranks"], evidence["world_size"], left_out(evidence)) == ([0, 1, 2, 3], 4, {})


def test_ranks_of_nodes_without_a_folder_are_unseen(tmp_path):
    save(tmp_path / "a", "n1", {0: WAITING, 1: WAITING})
    save(tmp_path / "b", "n2", {4: WAITING, 5: WAITING}, world_size=8)
    report, evidence = about(tmp_path)
    assert report.verdict is None
    assert evidence["unclear"].endswith("which ones; there is no evidence from ranks 2, 3, 6, 7")
    assert [step for step in evidence["collect"] if "on the nodes of the other ranks (ranks 2, 3, 6, 7)" in step]


def test_a_folder_of_another_job_is_left_out_by_name(tmp_path):
    other = replace(IDENTITY, name="yesterday", master_port=29600)
    save(tmp_path / "a", "n1", {0: WAITING, 1: AT_FAULT}, identity=other, wall_ns=10**18 - 10**15, world_size=2)
    save(tmp_path / "b", "n1", {0: AT_FAULT, 1: WAITING}, world_size=2)
    report, evidence = about(tmp_path)
    assert (report.verdict.ranks, evidence["seen_ranks"], evidence["world_size"]) == ((0,), [0, 1], 2)
    assert set(left_out(evidence)) == {str(path) for path in (tmp_path / "a").rglob("*.json")}
    assert evidence["not_read"] == [
        f"{tmp_path}/a/attach.json and 4 more: left out: of another job, yesterday, of 2 ranks; "
        "the one looked at last is job"
    ]


def test_an_earlier_look_at_the_same_ranks_is_left_out_with_the_nodes_that_it_did_not_reach(tmp_path):
    save(tmp_path / "1" / "n1", "n1", {0: AT_FAULT, 1: WAITING}, wall_ns=10**18 - 600 * 10**9, world_size=2)
    lost = NodeAnswer(node="n2", folder="", reason="no answer", remedy="see NODE")
    save_nodes(tmp_path / "1", AskedNodes(wall_ns=10**18, asked_by="srun", nodes=(lost,)))
    save(tmp_path / "2" / "n1", "n1", {0: WAITING, 1: AT_FAULT}, world_size=2)
    report, evidence = about(tmp_path)
    assert (report.verdict.ranks, evidence["notes"]) == ((1,), [])
    assert evidence["not_read"] == [
        f"{tmp_path}/1/nodes.json and 5 more: left out: ranks 0 and 1 were looked at again 10 minutes later"
    ]


def test_ranks_of_an_earlier_start_of_the_job_are_not_mixed_with_those_of_the_last(tmp_path):
    save(tmp_path / "a", "n1", {0: AT_FAULT, 1: WAITING}, wall_ns=10**18 - 10**12, restart_count=0)
    save(tmp_path / "b", "n2", {2: WAITING, 3: WAITING}, restart_count=1)
    report, evidence = about(tmp_path)
    assert (report.verdict, evidence["seen_ranks"]) == (None, [2, 3])
    assert set(left_out(evidence).values()) == {"left out: of an earlier start of the job"}
