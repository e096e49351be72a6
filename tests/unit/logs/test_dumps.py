"""Stacks, dumps of flight recorders and attached looks as evidence."""

import json
import pickle
import random
import struct
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ddpdoctor.diagnose.logs import analyze
from ddpdoctor.logs.flight import FLIGHT_JSON, FLIGHT_PICKLE
from ddpdoctor.logs.lines import Document
from ddpdoctor.logs.reading import choose_dumps
from ddpdoctor.logs.stacks import JSON_STACKS, STACKS
from ddpdoctor.model.attached import AskedNodes, AttachedJob, JobIdentity, Movement, NodeAnswer, RankLook, Refusal
from ddpdoctor.model.codec import encode
from ddpdoctor.model.log_facts import Stacked, Who
from ddpdoctor.rules.logs.flight import compare_flight
from tests.flight_dumps import recorders
from tests.golden import outline, table
from tests.unit.attach.test_asked import process, seen_rank

# Stacks in every format: whose they are, which thread counts, and what it does.


def test_json_of_py_spy() -> None:
    frame = {"name": "lookup", "filename": "/home/u/cache.py", "module": None, "short_filename": "cache.py", "line": 31}
    thread = {"pid": 9, "thread_id": 1, "os_thread_id": 9, "active": True, "owns_gil": True, "frames": [frame]}
    body = json.dumps([{**thread, "thread_name": "MainThread"}]).encode()
    assert JSON_STACKS.recognizes(body)
    (stack,) = JSON_STACKS.read(Document(source="s", path=None, body=body, who=Who(rank=1))).facts
    assert isinstance(stack, Stacked)
    assert (stack.who, stack.state, stack.frames[0].file) == (Who(rank=1, pid=9), "active+gil", "/home/u/cache.py")
    assert JSON_STACKS.read(Document(source="s", path=None, body=body[:-9])).problem.startswith("damaged")


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
    assert not STACKS.recognizes(text.encode())
    assert not JSON_STACKS.recognizes(text.encode())


# Dumps of the flight recorder may come from anybody: none raises an error, runs code or takes all memory.


ODD: tuple[Any, ...] = (
    None, True, -1, 2**40, 2**70, 1.5, float("nan"), "", "[0, 1]", [], [[1]], ["a"], {}, {"a": 1}, (), ("0", 1), b"x",
    [[2**70, 2**70]], [["a"]],
)  # fmt: skip


def read_flight(body, name="nccl_trace_rank_0"):
    raw = body if isinstance(body, bytes) else pickle.dumps(body, 2)
    return FLIGHT_PICKLE.read(Document(source=name, path=None, body=raw))


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
    assert FLIGHT_JSON.recognizes(head) is is_dump


def test_a_pickle_of_something_else_is_no_dump():
    assert not FLIGHT_PICKLE.recognizes(pickle.dumps({"version": 1, "state_dict": {}}, 2))


# What `analyze` says of folders that `attach` saved, where a source was refused or a node was not reached.


NO_PY_SPY = Refusal(source="py-spy", reason="py-spy is not installed", remedy="pip install 'ddpdoctor[attach]'")
WAITING, AT_FAULT = ("all_reduce", "/venv/torch/distributed/distributed_c10d.py"), ("fetch", "/home/me/train.py")
IDENTITY = JobIdentity(name="job", master_addr="n1", master_port=29500)


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
                process=process(state="T" if rank in stopped else "S"), stacks=None if refused else stacks(*what), refused=(what,) if refused else (),
            )  # fmt: skip
            (folder / f"look_{number}" / f"rank_{rank}_pid_{100 + rank}.json").write_text(json.dumps(encode(look)))
    job = AttachedJob(
        host=host, wall_ns=wall_ns, job=identity, world_size=world_size, ranks=tuple(seen.values()), looks=2,
        gap_s=3.0, movement=Movement.STILL, movements=(), refused=(), files=(),
    )  # fmt: skip
    (folder / "attach.json").write_text(json.dumps(encode(job)))
    return folder


def nodes_of(folder, **answers):
    """Save what a launcher's `attach` had of each node: its folder, or why there is none."""
    nodes = [NodeAnswer(node=name, folder=name) if one is None else NodeAnswer(node=name, folder="", reason=one, remedy="see NODE")
             for name, one in answers.items()]  # fmt: skip
    asked = AskedNodes(wall_ns=10**18, asked_by="srun", nodes=tuple(nodes))
    (folder / "nodes.json").write_text(json.dumps(encode(asked)))


DAMAGED = '{"format": "ddpdoctor-attach", "version": 1, "kind": "look", "number": "x"}'
WAIT_TWO, STUCK_TWO, UNSEEN = {0: WAITING, 1: WAITING}, {2: WAITING, 3: AT_FAULT}, dict.fromkeys(range(4), NO_PY_SPY)
LONGER, YESTERDAY = replace(IDENTITY, name="job@29500"), replace(IDENTITY, name="yesterday", master_port=29600)
NOW, OF_TWO = 10**18, {"world_size": 2}


def saved(parts):
    """Return what `analyze` says of these folders."""
    with TemporaryDirectory() as place:
        for part, those in parts.items():
            if isinstance(those, dict):
                nodes_of(Path(place, part), **those)
            elif isinstance(those, str):
                Path(place, part).write_text(those)
            else:
                save(Path(place, part), *those[:2], **(those[2] if len(those) > 2 else {}))
        report = analyze([place], (), "2026-01-01T00:00:00")
    names = ("job", "notes", "unclear", "collect", "seen_ranks", "world_size", "not_read")
    evidence = report.data["evidence"]
    left_out = [f"{one['source']}: {one['left_out']}" for one in evidence["sources"] if one["left_out"]]
    found = {"verdict": report.verdict, "left out": left_out} | {one: evidence[one] for one in names}
    return outline(found).replace(place, "")


test_rows = table("dumps", globals())
