"""Sweeps for the tests of what follows from them: made up, or published by others."""

from dataclasses import replace

from ddpdoctor.model.bandwidth import Bench, BenchSettings, Collective, Measurement, Member, Mode
from ddpdoctor.rules.bandwidth.sweeps import sort_sweeps

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
        nccl="2.27.7" if device == "cuda" else None, driver=None, variables=variables or {},
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
