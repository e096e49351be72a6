"""Makes what a bench measured: sweeps, edges between ranks, and the reasons for what is slow."""

import math
from dataclasses import replace
from itertools import combinations

from ddpdoctor.model.bandwidth import (
    Arrival,
    Bench,
    BenchSettings,
    Collective,
    Measurement,
    Member,
    Mode,
    NcclLog,
    NodeResult,
    Pair,
)
from ddpdoctor.model.node import BusyCpu, Governor, Load
from ddpdoctor.rules.bandwidth.curves import Measured, sort_sweeps
from ddpdoctor.rules.bandwidth.reasons import view
from tests.rules.environment.build import fleet, node, process

KIB, MIB, GIB = 2**10, 2**20, 2**30
FACTORS = {
    Collective.ALL_REDUCE: lambda ranks: 2 * (ranks - 1) / ranks,
    Collective.BROADCAST: lambda _: 1.0,
    Collective.REDUCE: lambda _: 1.0,
    Collective.SEND_RECV: lambda _: 1.0,
}

H200 = {
    32 * KIB: 1.44, 64 * KIB: 2.93, 128 * KIB: 5.73, 256 * KIB: 11.74, 512 * KIB: 23.94, MIB: 39.93, 2 * MIB: 64.53,
    4 * MIB: 107.16, 8 * MIB: 155.53, 16 * MIB: 219.89, 32 * MIB: 275.84, 64 * MIB: 346.51, 128 * MIB: 401.93,
    256 * MIB: 436.15, 512 * MIB: 450.29, GIB: 463.58, 2 * GIB: 469.17, 4 * GIB: 473.10, 8 * GIB: 477.45,
    16 * GIB: 482.26,
}  # fmt: skip
"""8 H200, https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/results/all-reduce-8xH200.md"""
A100 = {
    32 * KIB: 1.31, 64 * KIB: 2.45, 128 * KIB: 4.43, 256 * KIB: 7.47, 512 * KIB: 11.41, MIB: 18.00, 2 * MIB: 36.18,
    4 * MIB: 72.33, 8 * MIB: 109.93, 16 * MIB: 106.16, 32 * MIB: 138.49, 64 * MIB: 171.54, 128 * MIB: 176.92,
    256 * MIB: 194.07, 512 * MIB: 222.72, GIB: 229.04, 2 * GIB: 231.41, 4 * GIB: 233.88, 8 * GIB: 234.61,
    16 * GIB: 234.89,
}  # fmt: skip
"""8 A100, https://github.com/stas00/ml-engineering/blob/master/network/README.md#real-network-throughput"""


def upto(curve, size):
    return {at: gb_s for at, gb_s in curve.items() if at <= size}


def row(size, gb_s, *, ranks=8, noise=0.01, iterations=20, **changes):
    """One size at a bus bandwidth; ``noise`` is the half-width of the interval of the median, as a share."""
    collective = changes.get("collective", Collective.ALL_REDUCE)
    factor = FACTORS.get(collective, lambda n: (n - 1) / n)(ranks)
    algbw = gb_s / (factor or 1)
    time_us = size / algbw / 1e3
    one = Measurement(
        collective=collective, dtype="float32", redop="sum" if collective.reduces else None, mode=Mode.THROUGHPUT,
        in_place=False, size_bytes=size, count=size // 4, iterations=iterations, first_us=9 * time_us,
        min_us=time_us * (1 - 2 * noise), p50_us=time_us, p95_us=time_us * (1 + 3 * noise),
        p50_low_us=time_us * (1 - noise), p50_high_us=time_us * (1 + noise), cv=noise, algbw_gb_s=algbw,
        busbw_gb_s=gb_s if ranks > 1 else None, warm=True, wrong=0,
    )  # fmt: skip
    return replace(one, **changes)


def sweep(curve, **changes):
    return tuple(row(size, gb_s, **changes) for size, gb_s in curve.items())


def linear(alpha_us, algbw_gb_s, sizes, *, ranks=8, **changes):
    """Rows that follow t = alpha + S/B exactly."""
    factor = 2 * (ranks - 1) / ranks
    return tuple(
        row(size, factor * size / (alpha_us + size / algbw_gb_s / 1e3) / 1e3, ranks=ranks, **changes) for size in sizes
    )


def series(rows):
    (one,) = sort_sweeps(rows)
    return one


def powers(first, last, factor=2):
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


def members(ranks=8, hosts=1, *, name="NVIDIA H200", device="cuda", variables=None, **changes):
    per_host = ranks // hosts
    first = Member(
        rank=0, local_rank=0, host="", pid=0, device="", device_name=name, cores=16, version="1.2.3", torch="2.13.0",
        nccl="2.27.3" if device == "cuda" else None, driver=None, variables=variables or {},
    )  # fmt: skip
    return tuple(
        replace(
            first, rank=rank, local_rank=rank % per_host, host=f"node{rank // per_host}", pid=4000 + rank,
            device=f"cuda:{rank % per_host}" if device == "cuda" else "cpu", **changes,
        )
        for rank in range(ranks)
    )  # fmt: skip


def bench(rows=(), *, ranks=8, hosts=1, name="NVIDIA H200", device="cuda", backend=None, variables=None, **changes):
    """A bench of GPUs of one host, over NCCL; on CPUs over Gloo."""
    settings = changes.pop("settings", None) or BenchSettings(
        backend=backend or ("gloo" if device == "cpu" else "nccl")
    )
    return Bench(
        settings=settings,
        members=members(ranks, hosts, name=name, device=device, variables=variables),
        results=tuple(rows),
        **changes,
    )


# Benches and machines for tables of reasons, with a healthy one as the default.


def member(rank, host="node0", local_rank=None):
    return Member(
        rank=rank, local_rank=rank if local_rank is None else local_rank, host=host, pid=100 + rank, device="cpu",
        device_name="a processor", cores=2, version="1", torch="2.13.0",
    )  # fmt: skip


def log(rank, network="IB", interfaces=("mlx5_0:1",), nvls=None, **transports):
    """``transports`` by name: NET_IB stands for NET/IB."""
    ways = {name.replace("_", "/"): count for name, count in transports.items()}
    return NcclLog(rank=rank, network=network, interfaces=interfaces, transports=ways, nvls=nvls)


def bench_of(*hosts, backend="gloo", results=(), logs=(), **settings):
    """One rank a name of a host: bench_of("node0", "node0", "node1")."""
    return Bench(
        settings=BenchSettings(backend=backend, **settings),
        members=tuple(member(rank, host) for rank, host in enumerate(hosts)),
        results=tuple(row(64 * MIB, one, ranks=2) for one in results),
        nccl_logs=tuple(logs),
    )


def machine(host="node0", *, ranks=(0, 1), cpus=((0, 1),), load=None, variables=None, **sections):
    """A node with these ranks; ``cpus`` are those of each rank in turn."""
    placed = [
        process(rank, cpus=cpus[at % len(cpus)], LOCAL_WORLD_SIZE=str(len(ranks)), **(variables or {}))
        for at, rank in enumerate(ranks)
    ]
    return node(host, processes=placed, **({} if load is None else {"load": load}), **sections)


def load(busy=None, *, steal=0.0, governors=()):
    return Load(
        window_s=0.4,
        busy=tuple(BusyCpu(cpu=cpu, share=share) for cpu, share in (busy or {}).items()),
        steal_share=steal,
        governors=tuple(governors),
    )


def governor(name="powersave", driver="acpi-cpufreq", preference="", cpus=2):
    return Governor(name=name, driver=driver, preference=preference, cpus=cpus)


def reported(question, seen, *nodes):
    """Return what one family of reasons says: effects by name, and texts."""
    return [(effect.name, reason) for effect, reason in question(view(seen, fleet(*nodes)))]


# Pairs and nodes that were measured in nine turns, for the rules that say who is slow.


TURNS = 9
USUAL_GB_S, USUAL_US = 1.0, 400.0
NARROW = 0.012
"""Of the usual bandwidth: a limit of 100 Mbit/s."""


def noise(*place):
    """Return a factor of 0.8 to 1.25, always the same for the same place."""
    return 1.25 ** math.sin(sum(number * step for number, step in zip(place, (12.9898, 78.233, 37.719), strict=False)))


def pairs(hosts, bandwidth=None, latency=None, turns=None, *, alone=True):
    """Return all pairs of ranks; ``bandwidth`` and ``latency`` are factors by pair, in the turns given or in all."""
    return tuple(
        Pair(
            ranks=(one, other), hosts=(hosts[one], hosts[other]), alone=alone, cv=0.1,
            **turns_seen(
                (one, other), (bandwidth or {}).get((one, other), 1.0), (latency or {}).get((one, other), 1.0), turns
            ),
        )
        for one, other in combinations(range(len(hosts)), 2)
    )  # fmt: skip


def nodes(hosts, bandwidth=None, latency=None, turns=None, *, alone=True):
    """Return each host with several ranks by itself, then all pairs of hosts; factors by host or two of them."""
    names = tuple(dict.fromkeys(hosts))
    several = [name for name in names if hosts.count(name) > 1]
    return tuple(
        NodeResult(
            host=host, peer=peer, alone=alone, cv=0.1,
            ranks=tuple(rank for rank, name in enumerate(hosts) if name in {host, peer}),
            **turns_seen(
                (names.index(host), 0 if peer is None else names.index(peer)),
                (bandwidth or {}).get((host, peer), 1.0), (latency or {}).get((host, peer), 1.0), turns,
            ),
        )
        for host, peer in (*((name, None) for name in several), *combinations(names, 2))
    )  # fmt: skip


def turns_seen(place, bandwidth, latency, turns):
    """Return the fields of a result that was measured in nine turns, and slow by these factors in some or all."""
    slow = range(TURNS) if turns is None else turns
    busbws_gb_s = tuple(
        USUAL_GB_S * noise(*place, turn) * (bandwidth if turn in slow else 1.0) for turn in range(TURNS)
    )
    latencies_us = tuple(USUAL_US * noise(*place, -turn) * (latency if turn in slow else 1.0) for turn in range(TURNS))
    return {
        "busbws_gb_s": busbws_gb_s, "busbw_gb_s": sorted(busbws_gb_s)[TURNS // 2],
        "latencies_us": latencies_us, "latency_us": sorted(latencies_us)[TURNS // 2],
    }  # fmt: skip


def with_end(end, count, factor):
    """Return this factor for all pairs of one end."""
    return {(one, other): factor for one, other in combinations(range(count), 2) if end in {one, other}}


def arrival(rank, late_us, share, calls=500):
    return Arrival(rank=rank, host="a", late_us=late_us, late_p95_us=2 * abs(late_us), share=share, calls=calls)


def scene(hosts, *, reasons=(), **seen):
    members = tuple(member(rank, host, 0) for rank, host in enumerate(hosts))
    asked = BenchSettings(pairs="pairs" in seen, by_node="nodes" in seen)
    return Measured(bench=Bench(settings=asked, members=members, **seen), reasons=reasons)
