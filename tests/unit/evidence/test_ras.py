"""Reports of NCCL's RAS: who is behind, who is ahead, who does not answer, and whether a job moves."""

import json
from typing import Any

import pytest

from ddpdoctor.evidence.ras import RasJsonReader, RasReader
from ddpdoctor.evidence.reader import Document
from ddpdoctor.model.evidence import Absent, Differ, Fact, Failed, Finished, Hint, Inside, Moving, Size, Waiting
from tests.unit.evidence.reading_lines import read_text

HEAD = """\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {errors}
    1         8         4         1         4        32   RUNNING      OK

Errors
======

"""


def report(warnings: str = "", errors: str = "MISMATCH", wrong: str = "") -> str:
    return f"{HEAD.format(errors=errors)}{wrong}\nWarnings\n========\n\n{warnings}\n"


def mismatch(*lines: str, op: str = "AllReduce") -> str:
    words = f"#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different {op} operation counts\n"
    return words + "".join(f"  {line}\n" for line in lines)


def one(rank: int, number: int) -> str:
    return f"Rank {rank} has launched up to operation {number} -- {where(rank)}"


def where(rank: int) -> str:
    return f"GPU {rank % 8} managed by process {500 + rank} on node 10.0.3.{rank // 8}"


def read(text: str) -> list[Fact]:
    return [fact for fact in read_text(RasReader(), text) if not isinstance(fact, Hint)]


def of(kind: type[Fact], facts: list[Fact]) -> list[Any]:
    return [fact for fact in facts if isinstance(fact, kind)]


def test_the_rank_with_the_lower_count_is_behind() -> None:
    facts = read(report(mismatch("31 ranks have launched up to operation 641", one(12, 640))))
    (absent,) = of(Absent, facts)
    assert (absent.who.rank, absent.who.address, absent.who.pid) == (12, "10.0.3.1", 512)
    assert (absent.operation.op, absent.operation.seq) == ("all_reduce", 641)
    assert absent.waiters == tuple(rank for rank in range(32) if rank != 12)
    assert absent.certain is False
    assert [fact.ranks for fact in of(Size, facts)] == [32]


def test_a_large_distance_is_certain_in_one_report() -> None:
    (absent,) = of(Absent, read(report(mismatch("31 ranks have launched up to operation 641", one(12, 600)))))
    assert absent.certain


def test_ranks_that_are_ahead_are_named_and_not_blamed() -> None:
    named = ["2 ranks have launched up to operation 641", f"Rank 12 -- {where(12)}", f"Rank 13 -- {where(13)}"]
    facts = read(report(mismatch("30 ranks have launched up to operation 640", *named)))
    assert of(Absent, facts) == []
    assert [fact.who.rank for fact in of(Waiting, facts)] == [12, 13]


def test_several_that_are_behind_are_named_below_their_count() -> None:
    named = ["2 ranks have launched up to operation 640", f"Rank 3 -- {where(3)}", f"Rank 4 -- {where(4)}"]
    facts = read(report(mismatch("30 ranks have launched up to operation 641", *named, op="collective")))
    assert [fact.who.rank for fact in of(Absent, facts)] == [3, 4]


def test_a_rank_that_launched_nothing_is_behind() -> None:
    words = f"Rank 5 has not launched any operations -- {where(5)}"
    (absent,) = of(Absent, read(report(mismatch("31 ranks have launched up to operation 7", words))))
    assert (absent.who.rank, absent.certain) == (5, True)


def test_of_three_levels_the_lowest_counts() -> None:
    facts = read(report(mismatch("29 ranks have launched up to operation 9", one(1, 8), one(2, 7), one(3, 8))))
    assert [fact.who.rank for fact in of(Absent, facts)] == [2]


def test_behind_in_one_operation_and_ahead_in_another_is_a_mismatch() -> None:
    first = mismatch("31 ranks have launched up to operation 641", one(9, 640))
    second = (
        "  Communicator ranks have different AllGather operation counts\n  31 ranks have launched up to operation 7\n"
    )
    facts = read(report(f"{first}\n{second}  {one(9, 8)}\n"))
    (differ,) = of(Differ, facts)
    assert differ.odd == (9,)
    assert [(len(ranks), operation.op) for ranks, operation in differ.sides] == [(31, "all_reduce"), (1, "all_gather")]
    assert of(Absent, facts) == []


def test_a_report_that_is_well_says_the_size_only() -> None:
    assert [type(fact) for fact in read(report(errors="OK"))] == [Size]


DEAD = """\
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 521 on node 10.0.3.2 managing GPU 5

"""


@pytest.mark.parametrize(
    "rank", ["The missing rank: 21", f"Rank 21 -- {where(21)}", "Rank 21 -- [process information not found]"]
)
@pytest.mark.parametrize(
    "block", [DEAD, DEAD.replace("DEAD", "INCOMPLETE").replace("is considered dead", "is lacking")]
)
def test_a_process_that_does_not_answer_is_absent(rank: str, block: str) -> None:
    words = f"{block}#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n  {rank}\n\n"
    facts = of(Absent, read(report(errors="INCOMPLETE", wrong=words)))
    assert [fact.who.rank for fact in facts] == [21]


def test_a_process_without_a_rank_is_still_told() -> None:
    (absent,) = of(Absent, read(report(errors="INCOMPLETE", wrong=DEAD)))
    assert (absent.who.rank, absent.who.pid, absent.who.address) == (None, 521, "10.0.3.2")


def test_absurd_ranks_are_damage() -> None:
    words = mismatch("31 ranks have launched up to operation 641", one(1057455228, 640))
    facts = read_text(RasReader(), report(words))
    assert not of(Absent, facts)
    assert [fact.kind for fact in of(Hint, facts)].count("damaged") == 1


def test_counts_that_grow_between_two_reports_are_a_job_that_moves() -> None:
    first = mismatch("31 ranks have launched up to operation 641", one(12, 640))
    second = mismatch("31 ranks have launched up to operation 841", one(12, 840))
    facts = read(report(first) + report(second))
    assert of(Absent, facts) == []
    assert len(of(Moving, facts)) == 1


def test_counts_that_stand_still_between_two_reports_are_certain() -> None:
    words = report(mismatch("31 ranks have launched up to operation 641", one(12, 640)))
    (absent,) = of(Absent, read(words + words))
    assert absent.certain


def test_an_error_is_the_ranks_own_if_it_is_of_cuda() -> None:
    words = (
        "#0-0 (cf264af53edbe986) ERROR\n  Asynchronous errors on 2 ranks\n"
        f"  Rank 3 reported Unhandled CUDA error -- {where(3)}\n"
        f"  Rank 4 reported Remote process exited or there was a network error -- {where(4)}\n\n"
    )
    natures = {fact.who.rank: fact.nature.value for fact in of(Failed, read(report(errors="ERROR", wrong=words)))}
    assert natures == {3: "own", 4: "peer-lost"}


def test_a_rank_that_finalizes_while_others_run_has_left() -> None:
    words = (
        "#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different status\n"
        f"  31 ranks have status RUNNING\n  Rank 6 has status FINALIZE -- {where(6)}\n"
    )
    facts = read(report(words))
    assert [fact.who.rank for fact in of(Absent, facts)] == [6]
    assert [fact.who.rank for fact in of(Finished, facts)] == [6]


def test_a_report_among_other_lines_with_prefixes_is_found() -> None:
    text = report(mismatch("31 ranks have launched up to operation 641", one(12, 640)))
    ray = "".join(f"(RasWatcher pid=77, ip=10.0.3.0) {line}\n" for line in text.splitlines())
    assert [fact.who.rank for fact in of(Absent, read(f"step 1\n{ray}step 2\n"))] == [12]


def test_the_monitor_names_a_dead_process() -> None:
    (absent,) = read("[2025-12-19 13:07:07] PEER_DEAD: Process 1345 on node 172.16.64.245 managing GPU 1\n")
    assert isinstance(absent, Absent)
    assert (absent.who.pid, absent.who.address) == (1345, "172.16.64.245")


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
    reader = RasJsonReader()
    assert reader.recognizes(raw)
    found = reader.read(Document(source="ras.json", path=None, body=raw))
    return [fact for fact in found.facts if not isinstance(fact, Hint)], found.problem


def test_json_names_every_rank() -> None:
    facts, problem = read_json(body({0: 641, 1: 641, 2: 640, 3: 641}))
    (absent,) = of(Absent, facts)
    assert (absent.who.rank, absent.who.pid, absent.waiters, problem) == (2, 102, (0, 1, 3), "")


def test_json_after_lines_of_the_protocol_is_read() -> None:
    facts, _ = read_json(body({0: 9, 1: 9, 2: 8, 3: 9}), before="SERVER PROTOCOL 2\nOK\n")
    assert [fact.who.rank for fact in of(Absent, facts)] == [2]


def test_json_with_missing_ranks() -> None:
    facts, _ = read_json(body({0: 9, 1: 9, 2: 9}, missing=(3,)))
    assert [(fact.who.rank, fact.who.address) for fact in of(Absent, facts)] == [(3, "10.0.0.9")]


def test_json_twice_alike_is_all_inside_and_once_is_nothing() -> None:
    same = body({0: 9, 1: 9, 2: 9, 3: 9})
    assert [type(fact) for fact in read_json(same)[0]] == [Size]
    (inside,) = of(Inside, read_json(same, same)[0])
    assert inside.ranks == (0, 1, 2, 3)


def test_json_that_grows_is_a_job_that_moves() -> None:
    facts, _ = read_json(body({0: 9, 1: 9, 2: 8, 3: 9}), body({0: 19, 1: 18, 2: 18, 3: 19}))
    assert of(Absent, facts) == []
    assert len(of(Moving, facts)) == 1


def test_json_that_is_cut_off_says_so() -> None:
    facts, problem = read_json(body({0: 9, 1: 9, 2: 8, 3: 9}), body({0: 9, 1: 9, 2: 8, 3: 9}), cut=40)
    assert problem == "cut off"
    assert [fact.who.rank for fact in of(Absent, facts)] == [2]


@pytest.mark.parametrize("value", [None, 3, [], {"rank": "x"}, [{"rank": -1}], [{"rank": True, "status": 4}], "x"])
def test_json_with_wrong_types_does_not_raise(value: Any) -> None:
    wrong = body({0: 9, 1: 9})
    wrong["communicators"][0]["ranks"] = value
    wrong["communicators"][0]["missing_ranks"] = value
    wrong["communicators"].append(value)
    facts, problem = read_json(wrong)
    assert (of(Absent, facts), problem) == ([], "")


@pytest.mark.parametrize(
    "head",
    [b'{"communicators": 3}', b"NCCL version 2.27.3\nJob summary\n", b'[{"pid": 3}]', b'{"nccl_version": "2.1"}'],
)
def test_other_files_are_not_ras(head: bytes) -> None:
    assert not RasJsonReader().recognizes(head)
