"""NCCL's own log: who is who, what warnings mean, what is only a note."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.evidence.nccl_log import NcclLogReader
from ddpdoctor.model.evidence import (
    Called,
    DataWay,
    Fact,
    Failed,
    Hint,
    Link,
    Nature,
    NcclPaths,
    Seen,
    Size,
    Trouble,
    Waiting,
    Who,
)
from tests.unit.evidence.reading_lines import read_text

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
