"""NCCL's own log: who is who, what warnings mean, what is only a note."""

import json
from typing import Any

import pytest

from ddpdoctor.logs.lines import Document
from ddpdoctor.logs.nccl_log import NcclLogReader
from ddpdoctor.logs.ras import RAS_JSON
from ddpdoctor.model.log_facts import Absent, Called, Fact, Hint
from tests.golden import table
from tests.unit.logs.test_readers import read_text, shown


def read(text: str) -> list[Fact]:
    return read_text(NcclLogReader(), text)


def call(pid: int, number: int, op: str, count: int = 64, pointer: str = "0xa") -> str:
    return (
        f"n1:{pid}:{pid} [0] NCCL INFO {op}: opCount {number:x} sendbuff 0x1 recvbuff 0x2 count {count} datatype 7 "
        f"op 0 root 0 comm {pointer} [nranks=3] stream 0x3\n"
    )


def test_calls_that_differ_are_kept_although_they_are_old() -> None:
    text = "".join(
        call(pid, number, "AllReduce") for number in range(100) for pid in (1, 2, 3) if (pid, number) != (3, 44)
    )
    text = call(3, 44, "AllGather", pointer="0xc") + text.replace("[nranks=3]", "[nranks=3]")
    lines = text.splitlines(keepends=True)
    text = "".join(sorted(lines, key=lambda line: int(line.split("opCount ")[1].split()[0], 16))).replace("0xc", "0xa")
    called = [fact for fact in read(text) if isinstance(fact, Called)]
    odd = {(fact.who.pid, fact.operation.op) for fact in called if fact.operation.seq == 44}
    assert odd == {(1, "all_reduce"), (2, "all_reduce"), (3, "all_gather")}
    assert {fact.operation.seq for fact in called} == {44, 96, 97, 98, 99}


# Reports of NCCL's RAS: who is behind, who is ahead, who does not answer, and whether a job moves.


def body(counts: dict[int, int], missing: tuple[int, ...] = (), size: int = 4) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank, "host": f"10.0.0.{rank // 2}", "pid": 100 + rank, "cuda_dev": rank % 2, "nvml_dev": rank % 2,
            "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False},
            "collective_counts": {"Broadcast": 1, "AllReduce": count},
        }
        for rank, count in counts.items()
    ]  # fmt: skip
    lost = [
        {"rank": rank, "host": "10.0.0.9", "pid": 900, "status": {"unresponsive": True, "considered_dead": True}}
        for rank in missing
    ]
    comm = {"hash": "0xae94", "size": size, "ranks_count": len(ranks), "ranks": ranks, "missing_ranks": lost}
    return {"nccl_version": "2.29.1", "communicators_count": 1, "communicators": [comm], "ras": {"timeouts_count": 0}}


def read_json(*bodies: Any, cut: int = 0, before: str = "") -> tuple[list[Fact], str]:
    text = before + "\n".join(json.dumps(one) for one in bodies)
    raw = text.encode()[: len(text) - cut]
    assert RAS_JSON.recognizes(raw)
    found = RAS_JSON.read(Document(source="ras.json", path=None, body=raw))
    return [fact for fact in found.facts if not isinstance(fact, Hint)], found.problem


BEHIND, EVEN = body({0: 9, 1: 9, 2: 8, 3: 9}), body({0: 9, 1: 9, 2: 9, 3: 9})


def told(*bodies: Any, **more: Any) -> list[str]:
    facts, problem = read_json(*bodies, **more)
    return [*map(shown, facts), problem or "no problem"]


test_rows = table("nccl_log", globals())


@pytest.mark.parametrize("value", [None, 3, [], {"rank": "x"}, [{"rank": -1}], [{"rank": True, "status": 4}], "x"])
def test_json_with_wrong_types_does_not_raise(value: Any) -> None:
    wrong = body({0: 9, 1: 9})
    wrong["communicators"][0]["ranks"] = value
    wrong["communicators"][0]["missing_ranks"] = value
    wrong["communicators"].append(value)
    facts, problem = read_json(wrong)
    assert ([fact for fact in facts if isinstance(fact, Absent)], problem) == ([], "")


@pytest.mark.parametrize(
    "head",
    [b'{"communicators": 3}', b"NCCL version 2.27.3\nJob summary\n", b'[{"pid": 3}]', b'{"nccl_version": "2.1"}'],
)
def test_other_files_are_not_ras(head: bytes) -> None:
    assert not RAS_JSON.recognizes(head)
