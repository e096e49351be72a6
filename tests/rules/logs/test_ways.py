"""DD816: ways that are slower than the machines have, and healthy jobs that look alike. Lines have NCCL's own forms."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.diagnose.logs import analyze
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import Judgment
from ddpdoctor.model.node import Gpu, Gpus, Node, NvLink, Rdma, RdmaDevice, RdmaPort
from tests.golden import table

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


def found(*given: str | Node) -> Judgment:
    """Return what DD816 finds in logs and the report of `check-env` on these machines."""
    machines = [encode(one) for one in given if isinstance(one, Node)]
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(given):
            if isinstance(one, str):
                Path(folder, f"nccl.{number}.log").write_text(one)
        if machines:
            tool = {"name": "ddpdoctor", "version": "0"}
            report = {"schema_version": 1, "tool": tool, "data": {"nodes": machines}}
            Path(folder, "env.json").write_text(json.dumps(report, indent=2))
        report = analyze([folder], (), "")
    checks = tuple(one for one in report.checks if one.code == "DD816")
    return Judgment(findings=tuple(one for one in report.findings if one.code == "DD816"), checks=checks, certain=False)


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


def test_ranks_of_a_group_are_not_taken_for_global_ones() -> None:
    """Ranks 0 and 1 of each pair are on two hosts, while the global ranks 0 and 1 are on one."""
    log = "".join(NcclRank(rank=n, host=f"n{n // 2}", of=4, ways={n ^ 1: P2P}).lines() for n in range(4))
    for n in range(4):
        group = NcclRank(rank=n // 2, host=f"n{n // 2}", communicator=f"0xb{n % 2}", ways={1 - n // 2: TCP})
        head = f"n{n // 2}:{100 + n // 2}:{200 + n // 2} "
        log += group.lines().replace(head, f"n{n // 2}:{100 + n}:{200 + n} ").replace("comm 0xa", f"comm 0xc{n}")
    assert not found(log).findings


def test_what_nccl_does_is_explained(tmp_path: Path) -> None:
    before = ("NCCL_P2P_DISABLE set by environment to 1", "Init timings - x: rank 0 nranks 2 total 45.20 (topo 44.1)")
    (tmp_path / "a.log").write_text(job(SHM, "n1", "n1", before=before))
    notes = analyze([str(tmp_path)], (), "").data["evidence"]["notes"]
    assert "NCCL uses the network TCP (Socket) on n1" in notes
    assert "1 pair of ranks through the host's memory (SHM/direct/direct): 0-1, 2 channels each way" in notes
    assert "NCCL_P2P_DISABLE=1: no direct data exchange between the GPUs of a host" in notes
    assert "setting up a communicator took up to 45.2 s, which delays only the start" in notes


test_rows = table("ways", globals())
