"""NCCL's own log: who is who, what warnings mean, what is only a note."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.evidence.nccl_log import NcclLogReader
from ddpdoctor.evidence.ras import RasJsonReader, RasReader
from ddpdoctor.evidence.reader import Document
from ddpdoctor.model.evidence import (
    Absent,
    Called,
    DataWay,
    Differ,
    Fact,
    Failed,
    Finished,
    Hint,
    Inside,
    Link,
    Moving,
    Nature,
    NcclPaths,
    Seen,
    Size,
    Trouble,
    Waiting,
    Who,
)
from tests.unit.evidence.feeding import read_text

COMPLETION = "NET/IB: Got completion from peer 10.0.0.2<4> with "


def ready(pid: int, pointer: str, rank: int, of: int, name: str) -> str:
    words = f"comm {pointer} rank {rank} nranks {of} cudaDev 0 nvmlDev 0 busId 1a000 commId {name} - Init COMPLETE"
    return f"n{pid // 2}:{pid}:9 [0] NCCL INFO ncclCommInitRankConfig {words}\n"


def read(text: str) -> list[Fact]:
    return read_text(NcclLogReader(), text)


def without_hints(facts: Sequence[Fact]) -> list[Fact]:
    return [fact for fact in facts if not isinstance(fact, Hint | Seen | Size | NcclPaths)]


def warning(text: str) -> Fact:
    found = without_hints(read(f"n1:4711:4720 [3] misc/socket.cc:533 NCCL WARN {text}"))
    assert len(found) == 1, found
    return found[0]


VICTIMS = [
    ("Connection closed by remote peer n2<41234>", {"host": "n2"}),
    ("socketProgressOpt: Connection closed by remote peer node-b.cluster<41234>", {"host": "node-b.cluster"}),
    ("NET/Socket : peer 10.0.0.2<4> Connection closed by remote peer 10.0.0.2<33000>", {"address": "10.0.0.2"}),
    ("Call to recv from 10.0.0.2<33000> failed : Broken pipe", {"address": "10.0.0.2"}),
    ("Call to recv from ::ffff:10.0.0.2<33000> failed : Connection reset by peer", {"address": "10.0.0.2"}),
    ("Socket recv failed while polling for opId=0x7f1c2c", {}),
    ("[Service thread] Connection closed by localRank 7", {"host": "n1", "local_rank": 7}),
    (COMPLETION + "status=5 opcode=0 len=0 vendor err 249 (Recv)", {"address": "10.0.0.2"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "to"), VICTIMS)
def test_a_peer_that_is_gone_makes_a_victim(text: str, to: dict[str, Any]) -> None:
    fact = warning(text)
    assert isinstance(fact, Link)
    assert (fact.victim, fact.local) == (True, False)
    assert fact.to == Who(**to)
    assert (fact.who.host, fact.who.pid) == ("n1", 4711)


CONNECT = "socketPollConnect: Connect to 10.0.0.2<41001> returned "
LINKS = [
    ("Connect to 10.0.0.2<41001> failed : No route to host", "No route to host"),
    (CONNECT + "113(No route to host) errno 115(Operation now in progress)", "No route to host"),
    (CONNECT.replace("Con", "con") + "Connection refused, exceeded error retry count after 35 attempts", "refused"),
    ("ncclOsSocketPollConnect: connect to 10.0.0.2<41001> returned Connection timed out", "timed out"),
    ("Connect to ::ffff:10.0.0.2<41001> failed : Connection timed out", "timed out"),
    (COMPLETION + "status=12 opcode=0 len=0 vendor err 129 (Recv) hca mlx5_0", "mlx5_0"),
    (COMPLETION + "status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) vendor_err=129 hca mlx5_1", "mlx5_1"),
    ("NET/IB : Got completion from peer 10.0.0.2<4> with error 12, opcode 0, len 0, vendor err 129 (Recv)", "12"),
]


@pytest.mark.parametrize(("text", "says"), LINKS)
def test_a_link_that_fails_is_no_victim(text: str, says: str) -> None:
    fact = warning(text)
    assert isinstance(fact, Link)
    assert (fact.victim, fact.local) == (False, False)
    assert fact.to.address == "10.0.0.2"
    assert says in fact.problem


@pytest.mark.parametrize("address", ["127.0.0.1", "172.17.0.1"])
def test_an_address_that_leads_nowhere_else_is_the_other_hosts_interface(address: str) -> None:
    fact = warning(f"socketPollConnect: Connect to {address}<41001> returned 111(Connection refused) errno 115(x)")
    assert isinstance(fact, Link)
    assert "NCCL_SOCKET_IFNAME on the host that gave it" in fact.fix


LOCAL = [
    "NET/IB : mlx5_2:1 async fatal event: local catastrophic error",
    "NET/IB : mlx5_2:1 Got async error event: port error",
    "NET/IB : Unable to open device mlx5_2",
    "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401",
    COMPLETION + "status=4 opcode=32614 len=32614 vendor err 81 (Send) hca mlx5_1",
]


@pytest.mark.parametrize("text", LOCAL)
def test_a_fault_of_this_host_is_said_of_it(text: str) -> None:
    fact = warning(text)
    assert isinstance(fact, Link)
    assert (fact.victim, fact.local) == (False, True)


TROUBLES = [
    ("Bootstrap : no socket interface found", "interface"),
    ("Error: failed to extend /dev/shm/nccl-a1b2c3 to 9637888 bytes, error: No space left on device (28)", "shm"),
    ("Error while creating shared memory segment /dev/shm/nccl-Xk2 (size 9637888)", "shm"),
    ("Call to posix_fallocate failed : No space left on device", "shm"),
    ("Mismatched NCCL version detected : rank 0 version 22703 rank 1 version 22005", "version"),
    ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5e000", "duplicate-gpu"),
]


@pytest.mark.parametrize(("text", "kind"), TROUBLES)
def test_a_fault_of_the_start_has_a_kind_and_a_remedy(text: str, kind: str) -> None:
    fact = warning(text)
    assert isinstance(fact, Trouble)
    assert (fact.kind, fact.fatal) == (kind, True)
    assert fact.fix


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("Cuda failure 'out of memory'", True), ("Cuda failure 2 'out of memory'", True),
        ("Failed to CUDA calloc 6291456 bytes", True), ("Cuda failure 719 'unspecified launch failure'", False),
        ("Cuda failure 'an illegal memory access was encountered'", False),
    ],
)  # fmt: skip
def test_an_error_of_the_gpu_is_the_process_own(text: str, memory: bool) -> None:  # noqa: FBT001
    fact = warning(text)
    assert isinstance(fact, Failed)
    assert (fact.nature, fact.memory, fact.who.pid) == (Nature.OWN, memory, 4711)


@pytest.mark.parametrize(
    "line",
    [
        "n1:4711:4720 [0] misc/socket.cc:49 NCCL WARN Bootstrap : no socket interface found",
        "n1:4711:4720 [0] misc/socket.cc:49 (ncclFindInterfaces) NCCL WARN Bootstrap : no socket interface found",
        "[2026-03-09 14:02:11] n1:4711:4720 [0] bootstrap.cc:49 NCCL WARN Bootstrap : no socket interface found",
        " 40%|####  | 40/100 [00:10<n1:4711:4720 [0] bootstrap.cc:49 NCCL WARN Bootstrap : no socket interface found",
        "\x1b[33m[rank3]: n1:4711:4720 [0] bootstrap.cc:49 NCCL WARN Bootstrap : no socket interface found\x1b[0m",
        "cc:49 NCCL WARN Bootstrap : no socket interface found",
    ],
)
def test_every_form_of_head_is_read(line: str) -> None:
    (fact,) = without_hints(read(f"\n{line}"))
    assert isinstance(fact, Trouble)
    assert fact.kind == "interface"
    assert fact.spot.line == 2


HEALTHY = """\
NCCL version 2.27.3+cuda12.9
ws2:1:1 [0] NCCL INFO Bootstrap: Using eno1:192.168.1.7<0>
ws2:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
ws2:1:1 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so), using internal implementation
ws2:1:9 [0] NCCL INFO NET/IB : No device found.
ws2:1:9 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eno1
ws2:1:9 [0] NCCL INFO Could not find real path of /sys/class/pci_bus/0000:00/../../0000:00:01.0/max_link_speed
ws2:1:9 [0] NCCL INFO Using network Socket
ws2:1:9 [0] NCCL INFO NVLS multicast support is not available on dev 0
ws2:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
ws2:1:9 [0] NCCL INFO comm 0xa rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1a000 commId 0x6e - Init START
ws2:1:9 [0] NCCL INFO comm 0xa rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1a000 commId 0x6e - Init COMPLETE
ws2:2:8 [1] NCCL INFO comm 0xb rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId 4e000 commId 0x6e - Init START
ws2:2:8 [1] NCCL INFO comm 0xb rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId 4e000 commId 0x6e - Init COMPLETE
"""


def test_a_healthy_log_says_who_is_who_and_nothing_else() -> None:
    facts = read(HEALTHY)
    assert without_hints(facts) == []
    seen = {fact.who.rank: (fact.who.pid, fact.who.host, fact.gpu) for fact in facts if isinstance(fact, Seen)}
    assert seen == {0: (1, "ws2", "1a:00"), 1: (2, "ws2", "4e:00")}
    assert [fact.ranks for fact in facts if isinstance(fact, Size)] == [2]
    kinds = {fact.kind: fact.words for fact in facts if isinstance(fact, Hint)}
    assert set(kinds) == {"nccl-version", "interface"}
    assert kinds["nccl-version"] == "NCCL 2.27.3, built for CUDA 12.9"
    assert kinds["interface"] == "NCCL's connections go over eno1 on ws2 (192.168.1.7)"


def test_who_initializes_and_is_not_done_waits() -> None:
    text = "".join(f"{line}\n" for line in HEALTHY.splitlines() if "0xb" not in line)
    (fact,) = without_hints(read(text.replace("busId 1a000 commId 0x6e - Init COMPLETE", "x")))
    assert isinstance(fact, Waiting)
    assert (fact.in_init, fact.who.pid, fact.who.rank) == (True, 1, 0)


def test_the_largest_communicator_has_the_ranks() -> None:
    text = "".join(
        ready(r, f"0xa{r}", r % 2, 2, f"0x{r // 2}") + ready(r, f"0xb{r}", r, 4, "0x9") for r in range(4)
    )  # fmt: skip
    ranks = {fact.who.pid: fact.who.rank for fact in read(text) if isinstance(fact, Seen)}
    assert ranks == {0: 0, 1: 1, 2: 2, 3: 3}


def test_ranks_of_groups_are_not_taken_for_global_ones() -> None:
    text = "".join(ready(r, f"0xa{r}", r % 2, 2, f"0x{r // 2}") for r in range(4))
    assert {fact.who.rank for fact in read(text) if isinstance(fact, Seen)} == {None}


def test_a_warning_after_the_start_knows_its_rank() -> None:
    facts = without_hints(read(HEALTHY + "ws2:2:8 [1] enqueue.cc:1 NCCL WARN Cuda failure 'out of memory'\n"))
    assert [fact.who.rank for fact in facts] == [1]


def test_the_first_code_on_the_way_up_counts() -> None:
    text = "n1:7:8 [0] NCCL INFO misc/socket.cc:58 -> 6\nn1:7:8 [0] NCCL INFO proxy.cc:1 -> 3 [Proxy Thread]\n"
    (fact,) = without_hints(read(text))
    assert isinstance(fact, Link)
    assert fact.victim


def test_what_is_suspicious_is_a_note() -> None:
    text = (
        "n1:7:8 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB docker0:172.17.0.1<0>\n"
        "n1:7:8 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>\n"
        "n1:7:8 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.\n"
        "n1:7:8 [0] NCCL INFO Using network Socket\n"
    )
    facts = read(text)
    assert without_hints(facts) == []
    words = {fact.kind: fact.words for fact in facts if isinstance(fact, Hint)}
    assert "leads only to its own host" in words["suspicious-interface"]


DATA = Path(__file__).parents[2] / "data" / "nccl-logs"
EDGES = {
    "nvlink8": {DataWay.P2P},
    "no-p2p": {DataWay.SHM},
    "sockets": {DataWay.TCP, DataWay.SHM},
    "ib-no-gdr": {DataWay.NET},
    "ib-gdr": {DataWay.GDRDMA, DataWay.P2P},
    "plugin": {DataWay.GDRDMA, DataWay.P2P},
}


@pytest.mark.parametrize("name", EDGES)
def test_the_ways_between_ranks_are_read_from_all_forms_of_the_line(name: str) -> None:
    (paths,) = (fact for fact in read((DATA / f"{name}.txt").read_text()) if isinstance(fact, NcclPaths))
    assert {edge.way for edge in paths.edges} == EDGES[name]
    assert paths.network


@pytest.mark.parametrize(
    ("line", "way", "ends"),
    [
        ("Ring 00 : 0 -> 1 [send] via NET/Socket/0", DataWay.TCP, (0, 1)),
        ("Channel 03 : 1[4e000] -> 0[1a000] via P2P/indirect/2[5e000]", DataWay.INDIRECT, (1, 0)),
        ("Channel 03/1 : 3[3] -> 0[0] [receive] via NET/IB/0(1)/GDRDMA/Shared", DataWay.GDRDMA, (0, 3)),
        ("Channel 00 : 0[0] -> 1[1] via P2P/IPC comm 0x55 nRanks 02", DataWay.P2P, (0, 1)),
        ("Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct", DataWay.SHM, (0, 1)),
    ],
)
def test_a_connection_has_its_own_rank_and_its_peer(line: str, way: DataWay, ends: tuple[int, int]) -> None:
    (paths,) = (fact for fact in read(f"n1:7:8 [0] NCCL INFO {line}\n" * 2) if isinstance(fact, NcclPaths))
    (edge,) = paths.edges
    assert (edge.way, edge.own, edge.peer, edge.channels) == (way, *ends, 2)


def test_what_else_the_lines_say() -> None:
    text = "".join(
        f"n1:7:8 [0] NCCL INFO {one}\n"
        for one in (
            "NET/IB : Using [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [1]mlx5_2:1/RoCE [RO]; OOB eth0:10.0.0.4<0>",
            "NCCL_SHM_DISABLE set by environment to 1.",
            "DMA-BUF is available on GPU device 0",
            "NVLS multicast support is not available on dev 0 (NVLS_NCHANNELS 0)",
            "24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer",
            "Init timings - ncclCommInitRank: rank 2 nranks 16 total 31.08 (kernels 0.51, bootstrap 30.22)",
            "AllReduce: 8388608 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}",
            "AllReduce: 64 Bytes -> Algo 0 proto 0 time 11.2",
        )
    )
    (paths,) = (fact for fact in read(text) if isinstance(fact, NcclPaths))
    assert paths.adapters == ("mlx5_0", "mlx5_1", "mlx5_2")
    assert paths.settings == {"NCCL_SHM_DISABLE": "1"}
    assert (paths.dmabuf, paths.nvls, paths.channels, paths.init_s) == (True, False, 24, 31.08)
    assert paths.algorithms == {"AllReduce RING SIMPLE": 1, "AllReduce TREE LL": 1}


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


def test_calls_of_one_group_call_share_a_number() -> None:
    text = "".join(call(pid, 5, op) for pid in (1, 2, 3) for op in ("AllReduce", "AllGather"))
    called = [fact for fact in read(text) if isinstance(fact, Called)]
    assert len(called) == 6
    assert {fact.operation.group for fact in called} == {"comm no. 0 of 3 ranks"}


def test_a_secret_in_a_warning_is_hidden() -> None:
    text = "n1:7:8 [0] x.cc:1 NCCL WARN plugin failed with token=hf_abcdefghijklmnopqrstuvwxyz0123\n"
    assert not [fact for fact in read(text) if "abcdefghijklmnop" in repr(fact)]


# Reports of NCCL's RAS: who is behind, who is ahead, who does not answer, and whether a job moves.


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


def ras_of(text: str) -> list[Fact]:
    return [fact for fact in read_text(RasReader(), text) if not isinstance(fact, Hint)]


def of(kind: type[Fact], facts: list[Fact]) -> list[Any]:
    return [fact for fact in facts if isinstance(fact, kind)]


def test_the_rank_with_the_lower_count_is_behind() -> None:
    facts = ras_of(report(mismatch("31 ranks have launched up to operation 641", one(12, 640))))
    (absent,) = of(Absent, facts)
    assert (absent.who.rank, absent.who.address, absent.who.pid) == (12, "10.0.3.1", 512)
    assert (absent.operation.op, absent.operation.seq) == ("all_reduce", 641)
    assert absent.waiters == tuple(rank for rank in range(32) if rank != 12)
    assert absent.certain is False
    assert [fact.ranks for fact in of(Size, facts)] == [32]


def test_a_large_distance_is_certain_in_one_report() -> None:
    (absent,) = of(Absent, ras_of(report(mismatch("31 ranks have launched up to operation 641", one(12, 600)))))
    assert absent.certain


def test_ranks_that_are_ahead_are_named_and_not_blamed() -> None:
    named = ["2 ranks have launched up to operation 641", f"Rank 12 -- {where(12)}", f"Rank 13 -- {where(13)}"]
    facts = ras_of(report(mismatch("30 ranks have launched up to operation 640", *named)))
    assert of(Absent, facts) == []
    assert [fact.who.rank for fact in of(Waiting, facts)] == [12, 13]


def test_several_that_are_behind_are_named_below_their_count() -> None:
    named = ["2 ranks have launched up to operation 640", f"Rank 3 -- {where(3)}", f"Rank 4 -- {where(4)}"]
    facts = ras_of(report(mismatch("30 ranks have launched up to operation 641", *named, op="collective")))
    assert [fact.who.rank for fact in of(Absent, facts)] == [3, 4]


def test_a_rank_that_launched_nothing_is_behind() -> None:
    words = f"Rank 5 has not launched any operations -- {where(5)}"
    (absent,) = of(Absent, ras_of(report(mismatch("31 ranks have launched up to operation 7", words))))
    assert (absent.who.rank, absent.certain) == (5, True)


def test_of_three_levels_the_lowest_counts() -> None:
    facts = ras_of(report(mismatch("29 ranks have launched up to operation 9", one(1, 8), one(2, 7), one(3, 8))))
    assert [fact.who.rank for fact in of(Absent, facts)] == [2]


def test_behind_in_one_operation_and_ahead_in_another_is_a_mismatch() -> None:
    first = mismatch("31 ranks have launched up to operation 641", one(9, 640))
    second = (
        "  Communicator ranks have different AllGather operation counts\n  31 ranks have launched up to operation 7\n"
    )
    facts = ras_of(report(f"{first}\n{second}  {one(9, 8)}\n"))
    (differ,) = of(Differ, facts)
    assert differ.odd == (9,)
    assert [(len(ranks), operation.op) for ranks, operation in differ.sides] == [(31, "all_reduce"), (1, "all_gather")]
    assert of(Absent, facts) == []


def test_a_report_that_is_well_says_the_size_only() -> None:
    assert [type(fact) for fact in ras_of(report(errors="OK"))] == [Size]


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
    facts = of(Absent, ras_of(report(errors="INCOMPLETE", wrong=words)))
    assert [fact.who.rank for fact in facts] == [21]


def test_a_process_without_a_rank_is_still_told() -> None:
    (absent,) = of(Absent, ras_of(report(errors="INCOMPLETE", wrong=DEAD)))
    assert (absent.who.rank, absent.who.pid, absent.who.address) == (None, 521, "10.0.3.2")


def test_absurd_ranks_are_damage() -> None:
    words = mismatch("31 ranks have launched up to operation 641", one(1057455228, 640))
    facts = read_text(RasReader(), report(words))
    assert not of(Absent, facts)
    assert [fact.kind for fact in of(Hint, facts)].count("damaged") == 1


def test_counts_that_grow_between_two_reports_are_a_job_that_moves() -> None:
    first = mismatch("31 ranks have launched up to operation 641", one(12, 640))
    second = mismatch("31 ranks have launched up to operation 841", one(12, 840))
    facts = ras_of(report(first) + report(second))
    assert of(Absent, facts) == []
    assert len(of(Moving, facts)) == 1


def test_counts_that_stand_still_between_two_reports_are_certain() -> None:
    words = report(mismatch("31 ranks have launched up to operation 641", one(12, 640)))
    (absent,) = of(Absent, ras_of(words + words))
    assert absent.certain


def test_an_error_is_the_ranks_own_if_it_is_of_cuda() -> None:
    words = (
        "#0-0 (cf264af53edbe986) ERROR\n  Asynchronous errors on 2 ranks\n"
        f"  Rank 3 reported Unhandled CUDA error -- {where(3)}\n"
        f"  Rank 4 reported Remote process exited or there was a network error -- {where(4)}\n\n"
    )
    natures = {fact.who.rank: fact.nature.value for fact in of(Failed, ras_of(report(errors="ERROR", wrong=words)))}
    assert natures == {3: "own", 4: "peer-lost"}


def test_a_rank_that_finalizes_while_others_run_has_left() -> None:
    words = (
        "#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different status\n"
        f"  31 ranks have status RUNNING\n  Rank 6 has status FINALIZE -- {where(6)}\n"
    )
    facts = ras_of(report(words))
    assert [fact.who.rank for fact in of(Absent, facts)] == [6]
    assert [fact.who.rank for fact in of(Finished, facts)] == [6]


def test_a_report_among_other_lines_with_prefixes_is_found() -> None:
    text = report(mismatch("31 ranks have launched up to operation 641", one(12, 640)))
    ray = "".join(f"(RasWatcher pid=77, ip=10.0.3.0) {line}\n" for line in text.splitlines())
    assert [fact.who.rank for fact in of(Absent, ras_of(f"step 1\n{ray}step 2\n"))] == [12]


def test_the_monitor_names_a_dead_process() -> None:
    (absent,) = ras_of("[2025-12-19 13:07:07] PEER_DEAD: Process 1345 on node 172.16.64.245 managing GPU 1\n")
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
