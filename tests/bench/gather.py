"""How long 1,024 ranks take to gather over a real TCPStore, and to be judged: python -m tests.bench.gather [RANKS]

Rank 0 is the real one; the others are played by threads of this process, which also pays for packing what they send.
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore

import ddpdoctor
from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.system import ReadingPlan, System, read_node
from ddpdoctor.diagnose.machines import Facts, Hello, gather
from ddpdoctor.exchange.conversation import pack
from ddpdoctor.exchange.meeting import meet
from ddpdoctor.model.codec import encode
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import SECTIONS, Launcher, Node
from ddpdoctor.rules.engine import fleet_facts, judge
from ddpdoctor.rules.registry import rules_of
from tests.machines import load_machine
from tests.nvml import load_nvml

RANKS_A_NODE = 8
THREADS = 16
VARIABLES = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "8", "LOCAL_WORLD_SIZE": "8"}


def read_template() -> Node:
    """Return this machine's facts, with GPUs, PCI and RDMA of the recorded node with 8 GPUs."""
    plan = ReadingPlan(sections=frozenset(SECTIONS) - {"gpu_trial", "load"})
    here = read_node(System(), plan, ())
    with tempfile.TemporaryDirectory() as folder:
        machine = load_machine("nvlink8", Path(folder))
        recorded = read_node(machine, plan, ())
        *_, gpus = read_gpu_facts(load_nvml("nvlink8"), machine)
    return replace(here, gpus=gpus, pci=recorded.pci, rdma=recorded.rdma)


def facts_of(rank: int, template: Node, world_size: int) -> Facts:
    """Return what one rank of many says."""
    # Rank 0, which is this process itself, has a node of its own.
    host, local_rank = f"node{(rank + 7) // RANKS_A_NODE:04d}", (rank + 7) % RANKS_A_NODE
    variables = {**VARIABLES, "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    process = read_process(System(env=variables))
    return Facts(
        rank=rank,
        machine=host,
        container="",
        process=replace(process, pid=10**6 + rank),
        node=replace(template, host=host) if local_rank == 0 else None,
        host=host,
        version=ddpdoctor.__version__,
    )


def play(launch: Launch, ranks: range, template: Node) -> None:
    """Send what some ranks have to say, one after the other."""
    with meet(launch, {}, 30) as meeting:
        conversation = meeting.begin("fleet")
        for rank in ranks:
            facts = facts_of(rank, template, launch.world_size)
            conversation.send(f"hello/{rank}", Hello(host=facts.host, pid=facts.process.pid))
            conversation.send(f"facts/{conversation.add('arrived', 1)}", facts)
            conversation.add("heard", 1)


def main() -> None:
    """Print both times."""
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    template = read_template()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = Launch(
        launcher=Launcher.TORCHRUN,
        world_size=world_size,
        local_rank=0,
        hosts=("127.0.0.1",),
        port=server.port,
        run="bench/0",
        agent_store=True,
    )
    packed = pack(encode(facts_of(1, template, world_size)))
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(1, THREADS + 1):
            pool.submit(play, launch, range(first, world_size, THREADS), template)
        fleet = gather(launch, System(env=VARIABLES), ReadingPlan(sections=frozenset()), 60)
    gathered = time.perf_counter()
    assert fleet is not None
    assert not fleet.missing, fleet.problems
    judged = judge(rules_of("environment"), fleet_facts(fleet))
    ended = time.perf_counter()
    print(
        f"{world_size} ranks on {len(fleet.nodes)} nodes; the facts of a node are {len(packed) / 1024:.0f} KiB, packed"
    )
    print(f"gathered in {gathered - began:.1f} s (to be under 20 s)")
    print(f"judged by {len(judged.checks)} checks in {ended - gathered:.2f} s (to be under 2 s)")


if __name__ == "__main__":
    main()
