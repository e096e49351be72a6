"""Reports of allreduce-bench for the tests of what draws them: made up, of realistic size, the same every time."""

from dataclasses import replace

from ddpdoctor.model.bandwidth import (
    Advice,
    Arrival,
    Assessment,
    BenchSettings,
    Change,
    Collective,
    Comparison,
    Curve,
    Ending,
    Fit,
    LeftOut,
    Measurement,
    Mode,
    NcclLog,
    NodeResult,
    Pair,
    Reason,
    Reference,
    Stop,
)
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import (
    Check,
    Confidence,
    Finding,
    JobStatus,
    JobSummary,
    Outcome,
    RankRow,
    Report,
    Severity,
)
from tests.rules.bandwidth.build import members

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = tuple(KIB * 4**power for power in range(11))
"""1 KiB to 1 GiB."""
H100 = Reference(
    gb_s=460.0, high_gb_s=480.0, text="8 H100 over NVLink4, NVLS", source="NVIDIA/nccl-tests issue 212",
    min_size_bytes=256 * MIB,
)  # fmt: skip
SLOW_LINK = Finding(
    code="DD403", kind="slow-link", severity=Severity.WARNING, confidence=Confidence.HIGH, ranks=(2, 3),
    hosts=("node0", "node1"), summary="The link between ranks 2 and 3 gives 1.25 GB/s, the others 11.8 GB/s.",
    evidence=("each of the two is as fast as the others with every other rank",),
    fix="Test the cable and the switch port between node0 and node1.",
)  # fmt: skip
REASON = Reason(
    text="NCCL_P2P_DISABLE=1 is set: GPUs of one host exchange data through host memory", source="DD120 env-value",
    hosts=("node0",), fix="unset NCCL_P2P_DISABLE",
)  # fmt: skip


def measurement(
    size, *, collective=Collective.ALL_REDUCE, dtype="float32", mode=Mode.THROUGHPUT, ranks=8, alpha_us=20.0,
    gb_s=270.0, **changes,
):  # fmt: skip
    """One row of a link with this latency and algorithm bandwidth; a latency call costs 6 us more."""
    time_us = alpha_us + size / gb_s / 1e3 + (6.0 if mode is Mode.LATENCY else 0.0)
    algbw = size / time_us / 1e3
    factor = {Collective.ALL_REDUCE: 2 * (ranks - 1) / ranks, Collective.BROADCAST: 1.0}.get(
        collective, (ranks - 1) / ranks
    )
    row = Measurement(
        collective=collective, dtype=dtype, redop="sum" if collective.reduces else None, mode=mode, in_place=False,
        size_bytes=size, count=size // 4, iterations=max(8, 400 * MIB // (size + MIB)), first_us=time_us * 9,
        min_us=time_us * 0.94, p50_us=time_us, p95_us=time_us * 1.21, p50_low_us=time_us * 0.98,
        p50_high_us=time_us * 1.02, cv=0.034, algbw_gb_s=algbw, busbw_gb_s=algbw * factor if ranks > 1 else None,
        warm=True, wrong=0,
    )  # fmt: skip
    return replace(row, **changes)


def results(sizes=SIZES, modes=tuple(Mode), **keywords):
    return tuple(measurement(size, mode=mode, **keywords) for size in sizes for mode in modes)


def curve(**changes):
    one = Curve(
        collective=Collective.ALL_REDUCE, dtype="float32", redop="sum", mode=Mode.THROUGHPUT, in_place=False,
        plateau_gb_s=466.1, plateau_spread=0.021, plateau_from_bytes=256 * MIB, latency_us=20.3,
        fit=Fit(alpha_us=20.0, bandwidth_gb_s=270.0, residual=0.018, fits=True), half_bytes=5 * MIB + 200_000,
        assessment=Assessment.HEALTHY, reference=H100, share=1.013,
        verdict="466 GB/s at the plateau: healthy, 101 % of the reference (8 H100 over NVLink4, NVLS: 460-480 GB/s).",
    )  # fmt: skip
    return replace(one, **changes)


def latency_curve(**changes):
    return curve(
        mode=Mode.LATENCY, plateau_gb_s=462.0, latency_us=26.4, half_bytes=7 * MIB,
        fit=Fit(alpha_us=26.0, bandwidth_gb_s=270.0, residual=0.62, fits=False), assessment=Assessment.NO_REFERENCE,
        reference=None, share=None, verdict="26.4 us at small sizes.", **changes,
    )  # fmt: skip


def pair_matrix(ranks=4, *, slow=(2, 3), gb_s=11.8, slow_gb_s=1.25, per_host=1):
    return tuple(
        Pair(
            ranks=(one, other), hosts=(f"node{one // per_host}", f"node{other // per_host}"), latency_us=31.0,
            busbw_gb_s=slow_gb_s if (one, other) == slow else gb_s + (one + other) % 3 * 0.1, cv=0.02, alone=False,
        )
        for one in range(ranks) for other in range(one + 1, ranks)
    )  # fmt: skip


def node_matrix(hosts=3, slow="node2"):
    names = [f"node{number}" for number in range(hosts)]
    alone = [
        NodeResult(
            host=name, peer=None, ranks=(2 * at, 2 * at + 1), latency_us=9.0, busbw_gb_s=38.0, cv=0.02, alone=False
        )
        for at, name in enumerate(names)
    ]
    together = [
        NodeResult(
            host=one, peer=other, ranks=(0, 1, 2, 3), latency_us=30.0,
            busbw_gb_s=0.012 if slow in {one, other} else 11.9, cv=0.02, alone=True,
        )
        for at, one in enumerate(names) for other in names[at + 1 :]
    ]  # fmt: skip
    return (*alone, *together)


def change(size, ratio):
    now_us = measurement(size).p50_us
    return Change(
        collective=Collective.ALL_REDUCE, dtype="float32", redop="sum", mode=Mode.THROUGHPUT, in_place=False,
        size_bytes=size, now_us=now_us, then_us=now_us * ratio, ratio=ratio, ratio_low=ratio - 0.03,
        ratio_high=ratio + 0.03, below=ratio < 0.9,
    )  # fmt: skip


def comparison(below=1):
    ratios = [0.71 if at >= len(SIZES) - below else 1.01 for at in range(len(SIZES))]
    return Comparison(
        baseline="monday.json", differences=("torch 2.12.0 then, 2.13.0 now",),
        changes=tuple(change(size, ratio) for size, ratio in zip(SIZES, ratios, strict=True)), missing=2,
    )  # fmt: skip


ADVICE = Advice(
    model_bytes=700_000_000, dtype="bfloat16", whole_ms=3.1, bucket_mib=25.0, bucket_share=0.83, try_mib=60,
    gain_ms=0.4, gain_low_ms=0.1, gain_high_ms=0.7,
    text=(
        "All gradients of 350M parameters in bfloat16 (668 MiB) take about 3.1 ms in buckets of 25 MiB.",
        "A bucket of 25 MiB reaches 83 % of the plateau; bucket_cap_mb=60 would save 0.4 ms (0.1 to 0.7 ms).",
        "The real optimum depends on the model: how long its backward computes while buckets are on the way.",
    ),
)  # fmt: skip
ARRIVALS = tuple(
    Arrival(
        rank=rank, host="node0", late_us=20_100.0 if rank == 3 else -20_050.0, late_p95_us=20_400.0,
        share=0.98 if rank == 3 else 0.0, calls=400,
    )
    for rank in range(8)
)  # fmt: skip
LEFT_OUT = LeftOut(
    collective=Collective.ALL_REDUCE, dtype="float32", mode=None, sizes_bytes=(4 * GIB, 16 * GIB),
    reason="needs 48 GiB of 12 GiB free on rank 3",
)  # fmt: skip
HUNG_RANKS = tuple(
    RankRow(
        rank=rank, local_rank=rank, host="node0", pid=4000 + rank, state="stopped" if rank == 3 else "in all_reduce"
    )
    for rank in range(8)
)
STOPPED = Finding(
    code="DD606", kind="stopped", severity=Severity.ERROR, confidence=Confidence.HIGH, ranks=(3,), hosts=("node0",),
    summary="Rank 3 is stopped (state T); the others wait for it in all_reduce.",
    fix="kill -CONT 4003, and look for what stopped it.",
)  # fmt: skip
NCCL_LOG = NcclLog(
    rank=0, network="IB", interfaces=("mlx5_0:1", "mlx5_1:1"), transports={"P2P/CUMEM": 32, "NET/IB/GDRDMA": 4}
)


def report(
    *, rows=None, ranks=8, hosts=1, backend="nccl", device="cuda", name="NVIDIA H100 80GB HBM3", curves=None,
    findings=(), status=JobStatus.FINISHED, stop=None, settings=None, rank_rows=(), **data,
):  # fmt: skip
    """A finished run of one collective on 8 H100s, save for what is given."""
    rows = results(ranks=ranks) if rows is None else rows
    curves = (curve(), latency_curve()) if curves is None else curves
    found = {
        "verb": "allreduce-bench",
        "settings": encode(settings or BenchSettings(backend=backend)),
        "members": [encode(one) for one in members(ranks, hosts, device=device, name=name)],
        "results": [encode(one) for one in rows],
        "curves": [encode(one) for one in curves],
        "comparison": None,
        "advice": None,
        "stop": encode(stop) if stop else None,
        "world_size": ranks,
        "hosts": [f"node{number}" for number in range(hosts)],
        **{
            name: []
            for name in ("arrivals", "pairs", "nodes", "left_out", "loads", "nccl_logs", "wrong", "reasons", "notes")
        },
    }
    for part, value in data.items():
        found[part] = [plain(one) for one in value] if isinstance(value, (tuple, list)) else encode(value)
    ordered = tuple(sorted(findings, key=lambda finding: finding.severity.order))
    return Report(
        command=("ddpdoctor", "allreduce-bench"), started_at="2026-01-02T03:04:05.000+00:00",
        ended_at="2026-01-02T03:04:35.000+00:00",
        job=JobSummary(world_size=ranks, nnodes=hosts, status=status, exit_status=0),
        verdict=ordered[0] if ordered and ordered[0].severity is not Severity.INFO else None, findings=ordered,
        checks=(Check(id="wrong-data", code="DD401", group="bandwidth", outcome=Outcome.PASSED, seen="0 wrong"),),
        ranks=tuple(rank_rows), data=found, tool_version="1.2.3",
    )  # fmt: skip


def plain(value):
    return value if isinstance(value, str) else encode(value)


def everything():
    """A run of which every part of the report has something to show."""
    below = "231 GB/s at the plateau: below the reference, 50 % of 460 GB/s (8 H100 over NVLink4, NVLS)."
    curves = (curve(assessment=Assessment.BELOW, plateau_gb_s=231.0, share=0.5, verdict=below), latency_curve())
    return report(
        findings=(SLOW_LINK,), hosts=2, pairs=pair_matrix(), nodes=node_matrix(), comparison=comparison(),
        advice=ADVICE, arrivals=ARRIVALS, left_out=(LEFT_OUT,), nccl_logs=(NCCL_LOG,), reasons=(REASON,),
        notes=("8 ranks share 4 cores",), curves=curves,
    )  # fmt: skip


def hung():
    return report(
        rows=results(SIZES[:4]), curves=(), status=JobStatus.HUNG, findings=(STOPPED,),
        stop=Stop(ending=Ending.HUNG, phase="measure"), rank_rows=HUNG_RANKS,
    )  # fmt: skip


def one_rank():
    no_value = curve(
        plateau_gb_s=None, plateau_spread=None, plateau_from_bytes=None, half_bytes=None, fit=None, reference=None,
        assessment=Assessment.NOT_DEFINED, share=None, verdict="n/a: with one rank, no data crosses a link.",
    )  # fmt: skip
    return report(
        rows=results(SIZES[:3], modes=(Mode.THROUGHPUT,), ranks=1), curves=(no_value,), ranks=1, backend="gloo",
        device="cpu", name="AMD EPYC",
    )  # fmt: skip
