"""Jobs of which NCCL's log tells: whose warning it is, who is behind, and what is no warning at all."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddpdoctor.diagnose.evidence import analyze
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import Finding
from ddpdoctor.model.node import Gpu, Gpus, Node, NvLink, Rdma, RdmaDevice, RdmaPort
from tests.evidence_texts import interleaved, nccl, nccl_start, nccl_warn, raised, steps, text
from tests.rules.evidence.truths import ABSENT, Truth, hold

HOSTS = {0: ("h1", "10.0.0.1"), 1: ("h2", "10.0.0.2"), 2: ("h3", "10.0.0.3")}


def started(ranks: int = 2) -> list[list[str]]:
    """One process a host."""
    return [nccl_start(*HOSTS[rank], 20100 + rank, rank=rank, ranks=ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    "said",
    [
        "socketPollConnect: Connect to 10.0.0.2<41001> returned 113(No route to host) errno 115(Operation now in progress)",
        "Connect to 10.0.0.2<41001> failed : No route to host",
        "Net : Connect to 10.0.0.2<41001> failed : Connection refused",
        "socketStartConnect: Connect to 10.0.0.2<41001> failed : Connection timed out",
        "socketPollConnect: Connect to 10.0.0.2<41001> returned 110(Connection timed out) errno 115(Operation now in progress)",
    ],
)
def test_a_host_that_cannot_be_reached(tmp_path, said):
    log = text([*started()[0][:4], *nccl_warn("h1", 20100, said)])
    hold(
        tmp_path,
        {"h1.log": log, "h2.log": text(started()[1][:4])},
        Truth(kinds=("transport",), says=("10.0.0.2|h2",), ranks=()),
    )


def test_an_address_of_docker(tmp_path):
    said = "socketPollConnect: Connect to 172.17.0.1<41001> returned 111(Connection refused) errno 115(Operation now in progress)"
    log = text([*started()[0][:4], *nccl_warn("h1", 20100, said)])
    truth = Truth(kinds=("transport", "ifname-exists"), says=("172.17.0.1",), mentions=("NCCL_SOCKET_IFNAME",))
    hold(tmp_path, log, truth)


def test_no_interface(tmp_path):
    files = {
        "h1.log": text(started()[0][:1]),
        "h2.log": text(nccl_warn("h2", 20101, "Bootstrap : no socket interface found", place="bootstrap.cc:45")),
    }
    truth = Truth(kinds=("ifname-exists", "interface", "transport"), hosts=("h2",), mentions=("NCCL_SOCKET_IFNAME",))
    hold(tmp_path, files, truth)


def test_the_peer_ran_out_of_memory(tmp_path):
    """nccl 1235: [0] says that the peer closed; [3] had no memory."""
    start = [
        line for rank in range(4) for line in nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=4, gpu=rank)
    ]
    log = [
        *nccl_warn("h1", 100, "Connection closed by remote peer h1<41003>", gpu=0),
        *nccl_warn("h1", 103, "Cuda failure 'out of memory'", gpu=3, place="include/alloc.h:66"),
        *nccl_warn("h1", 103, "Failed to CUDA calloc 6291456 bytes", gpu=3, place="include/alloc.h:72"),
    ]
    hold(tmp_path, text([*start, *log]), Truth(kinds=("crash",), ranks=(3,), says=("memory",)))


def test_the_lowest_code_of_the_way_up_counts(tmp_path):
    """nccl 795: 6, a remote error, becomes 3 higher up: no internal error of this process."""
    way = [
        *nccl_warn("h1", 20100, "Call to recv from 10.0.0.2<41001> failed : Broken pipe", place="misc/socket.cc:50"),
        nccl("h1", 20100, "misc/socket.cc:773 -> 6"),
        nccl("h1", 20100, "transport/net_socket.cc:493 -> 6"),
        nccl("h1", 20100, "transport/net.cc:1298 -> 3"),
        nccl("h1", 20100, "proxy.cc:698 -> 3 [Progress Thread]"),
    ]
    truth = Truth(kinds=(*ABSENT, "transport"), ranks=(1,), or_cannot_tell=True, collect=("h2|10.0.0.2|rank 1|other",))
    hold(tmp_path, text([*started()[0], *way]), truth)


def test_the_host_that_most_name_ended_first(tmp_path):
    start = started(3)
    for rank in (0, 1):
        host = HOSTS[rank][0]
        start[rank] += nccl_warn(host, 20100 + rank, "Connection closed by remote peer h3<41003>")
    truth = Truth(kinds=ABSENT, hosts=("h3",), confidence=("low",))
    hold(tmp_path, {f"{HOSTS[rank][0]}.log": text(start[rank]) for rank in (0, 1)}, truth)


def test_a_local_rank_that_closed(tmp_path):
    start = [nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=4, gpu=rank) for rank in range(4)]
    for rank in (0, 1, 2):
        start[rank] += nccl_warn(
            "h1", 100 + rank, "[Service thread] Connection closed by localRank 3", rank, "misc/ipcsocket.cc:12"
        )
    hold(tmp_path, interleaved(*start), Truth(kinds=ABSENT, ranks=(3,), confidence=("low",)))


def test_retries_of_infiniband_are_used_up(tmp_path):
    said = "NET/IB: Got completion from peer 10.0.0.3<41003> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fe80::1 remoteGidsfe80::3 hca mlx5_0"
    start = started(3)
    for rank in (0, 1):
        start[rank] += nccl_warn(HOSTS[rank][0], 20100 + rank, said, place="transport/net_ib.cc:1295")
    files = {f"{HOSTS[rank][0]}.log": text(start[rank]) for rank in range(3)}
    hold(tmp_path, files, Truth(kinds=("transport",), hosts=("h3",), says=("10.0.0.3|h3",), ranks=()))


def test_a_flush_is_a_consequence(tmp_path):
    said = "NET/IB: Got completion from peer 10.0.0.2<41003> with status=5 opcode=0 len=0 vendor err 249 (Send)"
    files = {
        "h1.log": text([*started()[0], *nccl_warn("h1", 20100, said, place="transport/net_ib.cc:1295")]),
        "h2.log": text([*started()[1], *raised("ValueError: NaN in loss", 1)]),
    }
    hold(tmp_path, files, Truth(kinds=("crash",), ranks=(1,), says=("NaN in loss",)))


def test_the_status_of_nccl_2_29(tmp_path):
    said = "NET/IB: Got completion from peer 10.0.0.2<41003> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=0 vendor_err=129 req_type=Send localGid fe80::1 remoteGid fe80::2 hca mlx5_3"
    log = text([*started()[0], *nccl_warn("h1", 20100, said, place="transport/net_ib/p2p.cc:512 (ncclIbTest)")])
    hold(tmp_path, log, Truth(kinds=("transport",), says=("10.0.0.2|h2", "12", "mlx5_3")))


def test_an_adapter_that_fails(tmp_path):
    said = "NET/IB : mlx5_2:1 async fatal event: local catastrophic error"
    log = text([*started()[0], *nccl_warn("h1", 20100, said, place="transport/net_ib.cc:112")])
    hold(tmp_path, log, Truth(kinds=("transport",), hosts=("h1",), says=("mlx5_2",)))


def test_an_adapter_that_the_container_lacks(tmp_path):
    said = "NET/IB : Unable to open device mlx5_0"
    files = {
        "h1.log": text(started()[0][:4]),
        "h2.log": text([*started()[1][:3], *nccl_warn("h2", 20101, said, place="transport/net_ib.cc:234")]),
    }
    hold(tmp_path, files, Truth(kinds=("transport",), hosts=("h2",), says=("mlx5_0",)))


@pytest.mark.parametrize(
    "said",
    [
        "Error: failed to extend /dev/shm/nccl-Xa81bc to 33030532 bytes, error: No space left on device (28)",
        "Error while creating shared memory segment /dev/shm/nccl-Xa81bc (size 9637888)",
        "Call to posix_fallocate failed : No space left on device",
    ],
)
def test_shared_memory_is_full(tmp_path, said):
    """Every rank prints it: it is the environment."""
    logs = [
        [
            *nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=2, gpu=rank)[:5],
            *nccl_warn("h1", 100 + rank, said, rank, "misc/shmutils.cc:72"),
        ]
        for rank in range(2)
    ]
    truth = Truth(kinds=("shm", "crash", "transport"), ranks=(), says=("/dev/shm",), mentions=("shm-size",))
    hold(tmp_path, interleaved(*logs), truth)


def test_versions_differ(tmp_path):
    said = "Mismatched NCCL version detected : rank 1 version 22703 rank 0 version 22605"
    log = text([*started()[0][:4], *nccl_warn("h1", 20100, said, place="init.cc:1022")])
    hold(tmp_path, log, Truth(kinds=("version-same", "version"), says=("version",)))


def test_two_ranks_on_one_gpu(tmp_path):
    said = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5e000"
    logs = [
        [
            *nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=2)[:5],
            *nccl_warn("h1", 100 + rank, said, place="init.cc:943"),
        ]
        for rank in range(2)
    ]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("dup-gpu", "duplicate-gpu"), says=("GPU",)))


def test_nvlink_sharp(tmp_path):
    said = "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be performed in the present state'."
    log = text([*started()[0][:5], *nccl_warn("h1", 20100, said, place="transport/nvls.cc:244")])
    hold(
        tmp_path, log, Truth(kinds=("transport", "crash", "nvls"), hosts=("h1",), says=("NVLS",), mentions=("fabric",))
    )


def test_a_communicator_that_never_comes_up(tmp_path):
    """Ranks 0 and 2 began; rank 1 was seen until its bootstrap and no further."""
    logs = started(3)
    files = {"h1.log": text(logs[0][:5]), "h2.log": text(logs[1][:1]), "h3.log": text(logs[2][:5])}
    truth = Truth(
        kinds=(*ABSENT, "transport"), ranks=(1,), or_cannot_tell=True, not_ranks=(0, 2), collect=("rank 1|other ranks",)
    )
    hold(tmp_path, files, truth)


def called(host: str, pid: int, count: str, op: str, elements: int = 9984512, ranks: int = 4) -> str:
    return nccl(
        host,
        pid,
        f"{op}: opCount {count} sendbuff 0x7f01 recvbuff 0x7f02 count {elements} datatype 7 op 0 root 0 comm 0x55d1000{pid % 10:x}a0 [nranks={ranks}] stream 0x55",
    )


def test_calls_that_differ(tmp_path):
    """rccl 429: three make an AllReduce at opCount 28c, rank 2 an AllGather."""
    logs = []
    for rank in range(4):
        log = nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=4, gpu=rank)
        log += [called("h1", 100 + rank, f"{count:x}", "AllReduce") for count in range(0x289, 0x28C)]
        log.append(called("h1", 100 + rank, "28c", "AllGather" if rank == 2 else "AllReduce"))
        logs.append(log)
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(2,), says=("all_gather|AllGather",)))


def test_only_info_is_nothing_wrong(tmp_path):
    """nccl 541. Whether the job hangs cannot be told."""
    report = hold(tmp_path, interleaved(*started()), Truth(or_cannot_tell=True))
    assert report.verdict is None


ERROR = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {}, NCCL version 2.21.5\n{}\nLast error:\n{}"


@pytest.mark.parametrize(
    ("kind", "last", "truth"),
    [
        (
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
            "socketPollConnect: Connect to 10.0.0.2<41001> returned 113(No route to host) errno 115(Operation now in progress)",
            Truth(kinds=("transport",), ranks=(), says=("10.0.0.2",)),
        ),
        (
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
            "Error while creating shared memory segment /dev/shm/nccl-0YqDGx (size 9637888), error: No space left on device (28)",
            Truth(kinds=("shm",), ranks=(), says=("/dev/shm",)),
        ),
        (
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5e000",
            Truth(kinds=("dup-gpu",), ranks=(0, 1), says=("GPU",)),
        ),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            "Cuda failure 2 'out of memory'",
            Truth(kinds=("crash",), ranks=(0, 1), says=("out of memory",)),
        ),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "NET/IB: Got completion from peer 10.0.0.3<41003> with status=12 opcode=0 len=0 vendor err 129",
            Truth(kinds=("transport",), ranks=(), says=("10.0.0.3",)),
        ),
    ],
)
def test_nccls_own_words_in_errors_of_torch(tmp_path, kind, last, truth):
    logs = [raised(ERROR.format(kind.partition(":")[0], kind, last), rank) for rank in (0, 1)]
    hold(tmp_path, interleaved(*logs), truth)


def test_a_host_that_gives_an_address_of_docker(tmp_path):
    """nccl-tests 15: nobody says why; the addresses show it."""
    wrong = [nccl("h2", 20101, "Bootstrap: Using docker0:172.17.0.1<0>"), *started()[1][1:5]]
    hold(
        tmp_path,
        {"h1.log": text(started()[0][:5]), "h2.log": text(wrong)},
        Truth(kinds=("transport",), ranks=(), hosts=("h2",), says=("172.17.0.1",)),
    )


def test_docker_on_one_host_that_works(tmp_path):
    """Its twin: the communicator is there, and the steps go on."""
    log = [
        line.replace("eth0:10.0.0.1", "docker0:172.17.0.1") for line in nccl_start("h1", "10.0.0.1", 1, rank=0, ranks=1)
    ]
    hold(tmp_path, text([*log, *steps(30), "`Trainer.fit` stopped: `max_epochs=3` reached."]), Truth(silent=True))


# DD816: ways that are slower than the machines have, and healthy jobs that look alike. Lines have NCCL's own
# forms.


P2P, SHM, TCP = "P2P/CUMEM", "SHM/direct/direct", "NET/Socket/0"
IB, GDR = "NET/IB/0", "NET/IB/0/GDRDMA"


@dataclass(frozen=True, kw_only=True)
class NcclRank:
    """One process of a job, and what it writes with NCCL_DEBUG=INFO."""

    rank: int
    host: str = "n1"
    of: int = 2
    ways: dict[int, str] = field(default_factory=dict)
    """By peer."""
    network: str = "Socket"
    before: tuple[str, ...] = ()
    channels: int = 2
    communicator: str = "0x6e"

    def lines(self) -> str:
        head = f"{self.host}:{100 + self.rank}:{200 + self.rank} [0] NCCL INFO "
        address = f"10.0.0.{sum(map(ord, self.host)) % 250}"
        comm = f"comm 0xa{self.rank} rank {self.rank} nranks {self.of} cudaDev 0 busId 1a000 commId {self.communicator}"
        texts = [f"Bootstrap: Using eth0:{address}<0>", *self.before, f"Using network {self.network}"]
        texts += [f"ncclCommInitRankConfig {comm} - Init START"]
        texts += [f"{self.channels} coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels"]
        texts += [f"ncclCommInitRankConfig {comm} - Init COMPLETE"]
        for peer, way in self.ways.items():
            side = "[send] " if way.startswith("NET") else ""
            texts += [f"Channel 0{n}/0 : {self.rank}[0] -> {peer}[0] {side}via {way}" for n in range(2)]
        return "".join(f"{head}{one}\n" for one in [*texts, "Connected all rings, use ring PXN 0 GDR 0"])


def job(way: str, *hosts: str, **more: object) -> str:
    """Return the log of one rank a host in a ring; ``way`` is that of all connections."""
    of = len(hosts)
    ranks = (
        NcclRank(rank=n, host=host, of=of, ways={(n + 1) % of: way}, **more)  # type: ignore[arg-type]
        for n, host in enumerate(hosts)
    )
    return "NCCL version 2.27.5+cuda12.9\n" + "".join(one.lines() for one in ranks)


def found(folder: Path, log: str, *machines: Node) -> list[Finding]:
    """Return what DD816 finds in a log and the report of `check-env` on these machines."""
    (folder / "train.log").write_text(log)
    if machines:
        report = {
            "schema_version": 1,
            "tool": {"name": "ddpdoctor", "version": "0"},
            "data": {"nodes": [encode(one) for one in machines]},
        }
        (folder / "env.json").write_text(json.dumps(report, indent=2))
    report = analyze([str(folder)], (), "")
    return [one for one in report.findings if one.code == "DD816"]


def gpu(index: int = 0, links: int = 0, **more: object) -> Gpu:
    nvlinks = tuple(NvLink(index=n, active=True, errors=0) for n in range(links))
    return Gpu(
        index=index, uuid=f"g{index}", name="NVIDIA H100 80GB HBM3", bus_id=f"0000:{index}b:00.0", nvlinks=nvlinks,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def machine(host: str, *gpus: Gpu, state: str = "", peermem: bool = False) -> Node:
    port = RdmaPort(
        device="mlx5_0", port=1, state=state, phys_state="LinkUp", link_layer="InfiniBand", rate_gb_s=400, gids=(),
        counters={}, counters_later={},
    )  # fmt: skip
    device = RdmaDevice(name="mlx5_0", bus_id=None, board=None, firmware=None, ports=(port,))
    return Node(
        host=host,
        gpus=Gpus(driver="570", cuda_driver="12.8", devices=gpus, pairs=(), persistenced=True, fabric_manager=True),
        rdma=Rdma(
            devices=(device,) if state else (), peermem=peermem, dmabuf=False, uverbs=(), uverbs_denied=(), rdma_cm=True
        ),
    )


def test_tcp_between_ranks_of_one_host_names_the_variables(tmp_path: Path) -> None:
    off = ("NCCL_P2P_DISABLE set by environment to 1", "NCCL_SHM_DISABLE set by environment to 1.")
    (finding,) = found(tmp_path, job(TCP, "n1", "n1", before=off))
    assert (finding.ranks, finding.hosts, finding.fix) == ((0, 1), ("n1",), "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE")
    assert "exchange data over TCP, although they are on one host" in finding.summary
    assert "NCCL_SHM_DISABLE=1" in finding.evidence


def test_without_a_variable_the_check_of_the_machine_is_named(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, job(TCP, "n1", "n1"))
    assert "check-env shm p2p" in finding.fix


def test_the_connections_of_each_process_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"nccl.{rank}.log").write_text(NcclRank(rank=rank, ways={1 - rank: TCP}).lines())
    (finding,) = (one for one in analyze([str(tmp_path)], (), "").findings if one.code == "DD816")
    assert finding.ranks == (0, 1)


HEALTHY = {
    "NVLink on one host": job(P2P, "n1", "n1", "n1", "n1"),
    "the host's memory on one host": job(SHM, "n1", "n1"),
    "TCP between hosts without adapters": job(TCP, "n1", "n2"),
    "InfiniBand with GDRDMA": job(GDR, "n1", "n2", network="IB"),
    "InfiniBand through the host's memory": job(IB, "n1", "n2", network="IB"),
    "one host with adapters that it does not need": job(P2P, "n1", "n1", before=("NET/IB : Using [0]mlx5_0:1/IB ",)),
    "one machine that NCCL takes for two": job(TCP, "n1", "n1", before=("NCCL_HOSTID set by environment to a",)),
    "warnings only": "n1:1:2 [0] misc/socket.cc:533 NCCL WARN Connection closed by remote peer n2<41234>\n",
    "containers of one name on two machines": (
        NcclRank(rank=0, host="trainer", ways={1: TCP}).lines()
        + NcclRank(rank=1, host="trainer", ways={0: TCP}).lines().replace("10.0.0.", "10.0.1.")
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_stays_silent(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, HEALTHY[name]) == []


def test_ranks_of_a_group_are_not_taken_for_global_ones(tmp_path: Path) -> None:
    """Ranks 0 and 1 of each pair are on two hosts, while the global ranks 0 and 1 are on one."""
    log = "".join(NcclRank(rank=n, host=f"n{n // 2}", of=4, ways={n ^ 1: P2P}).lines() for n in range(4))
    for n in range(4):
        group = NcclRank(rank=n // 2, host=f"n{n // 2}", communicator=f"0xb{n % 2}", ways={1 - n // 2: TCP})
        head = f"n{n // 2}:{100 + n // 2}:{200 + n // 2} "
        log += group.lines().replace(head, f"n{n // 2}:{100 + n}:{200 + n} ").replace("comm 0xa", f"comm 0xc{n}")
    assert found(tmp_path, log) == []


def test_tcp_despite_adapters_that_the_log_names(tmp_path: Path) -> None:
    log = job(TCP, "n1", "n2", before=("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>",))
    both = found(tmp_path, log)
    assert {one.hosts for one in both} == {("n1",), ("n2",)}
    assert "has active InfiniBand or RoCE adapters (mlx5_0)" in both[0].summary


def test_tcp_despite_adapters_that_the_machine_has(tmp_path: Path) -> None:
    log = job(TCP, "n1", "n2", before=("NCCL_IB_DISABLE set by environment to 1.",))
    assert found(tmp_path, log, machine("n1", state="DOWN")) == []
    (finding,) = found(tmp_path, log, machine("n1.cluster.local", state="ACTIVE"))
    assert (finding.hosts, finding.fix) == (("n1",), "unset NCCL_IB_DISABLE")


def test_adapters_that_do_not_reach_gpu_memory(tmp_path: Path) -> None:
    log = job(IB, "n1", "n2", network="IB")
    assert found(tmp_path, log, machine("n1", gpu(), state="ACTIVE")) == []
    (finding,) = found(tmp_path, log, machine("n1", gpu(), state="ACTIVE", peermem=True))
    assert "no GDRDMA" in finding.summary
    assert "nvidia_peermem is loaded" in finding.summary
    assert found(tmp_path, job(GDR, "n1", "n2", network="IB"), machine("n1", gpu(), state="ACTIVE", peermem=True)) == []


def test_a_third_gpu(tmp_path: Path) -> None:
    found_ = found(tmp_path, job("P2P/indirect/2[5e000]", "n1", "n1"))
    assert [one.summary for one in found_] == ["ranks 0 and 1 on n1 communicate through a third GPU (P2P/indirect)"]


def test_host_memory_despite_nvlink(tmp_path: Path) -> None:
    log = job(SHM, "n1", "n1", before=("NCCL_P2P_DISABLE set by environment to 1",))
    (finding,) = found(tmp_path, log, machine("n1", gpu(0, 18), gpu(1, 18)))
    assert "although their GPUs have NVLink" in finding.summary
    assert finding.fix == "unset NCCL_P2P_DISABLE"
    assert found(tmp_path, log, machine("n1", gpu(0), gpu(1))) == []


def test_no_nvls_behind_nvswitches(tmp_path: Path) -> None:
    log = job(P2P, "n1", "n1", before=("NVLS multicast support is not available on dev 0",))
    (finding,) = found(tmp_path, log, machine("n1", gpu(0, 18, fabric_state="completed")))
    assert "NVLS is not available on n1" in finding.summary
    assert found(tmp_path, log, machine("n1", gpu(0, 18, fabric_state="not-supported"))) == []
    assert (
        found(tmp_path, log.replace("not available", "available"), machine("n1", gpu(0, fabric_state="completed")))
        == []
    )


def test_unequal_channels(tmp_path: Path) -> None:
    log = NcclRank(rank=0, ways={1: P2P}, channels=24).lines() + NcclRank(rank=1, ways={0: P2P}, channels=2).lines()
    (finding,) = found(tmp_path, log)
    assert finding.ranks == (1,)
    assert "2 channels for collectives, but others 24" in finding.summary


def test_what_nccl_does_is_explained(tmp_path: Path) -> None:
    before = ("NCCL_P2P_DISABLE set by environment to 1", "Init timings - x: rank 0 nranks 2 total 45.20 (topo 44.1)")
    (tmp_path / "a.log").write_text(job(SHM, "n1", "n1", before=before))
    notes = analyze([str(tmp_path)], (), "").data["evidence"]["notes"]
    assert "NCCL uses the network TCP (Socket) on n1" in notes
    assert "1 pair of ranks through the host's memory (SHM/direct/direct): 0-1, 2 channels each way" in notes
    assert "NCCL_P2P_DISABLE=1: no direct data exchange between the GPUs of a host" in notes
    assert "setting up a communicator took up to 45.2 s, which delays only the start" in notes
