"""DD816: ways that are slower than the machines have, and healthy jobs that look alike. Lines have NCCL's own forms."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddpdoctor.diagnose.evidence import analyze
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import Finding
from ddpdoctor.model.node import Gpu, Gpus, Node, NvLink, Rdma, RdmaDevice, RdmaPort

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
