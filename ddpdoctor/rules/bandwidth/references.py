"""What a curve is compared with: the user's figure, measurements of others on the same hardware, or nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Mode, Reference, describe_shared_gpus, read_references
from ddpdoctor.model.words import count_of
from ddpdoctor.rules.bandwidth.sweeps import curve_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Bench, KnownBandwidth
    from ddpdoctor.rules.bandwidth.sweeps import Sweep

REFERENCE_MARGIN = 0.10
"""How far below a figure of the table a system is still healthy. Our choice: Azure's gate for its H200 nodes is 431
GB/s, 9 % below the 473 that others measure on them
(https://github.com/Azure/azurehpc-health-checks/blob/main/conf/nd96isr_h200_v5.conf)."""
FLOATS = ("float32", "float16", "bfloat16")
"""The table's figures are for sums of these dtypes: NVLink switches, for example, do not add 8-bit integers."""
EXPECT = "--expect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What a curve is compared with. ``note`` says why there is no reference, or what to know about it."""

    reference: Reference | None
    note: str = ""
    margin: float = 0.0
    """The share below the reference that is still healthy."""
    steady: bool = False
    """Whether larger sizes use the same path, so that small ones limit what they can reach. This is not so with NCCL: 8
    healthy A100 give 18 GB/s at 1 MiB, where the last step has 43, and 235 GB/s at 16 GiB
    (https://github.com/stas00/ml-engineering/blob/master/network/README.md#real-network-throughput)."""

    @property
    def least_gb_s(self) -> float:
        """Return the bandwidth below which a plateau is too low."""
        return 0.0 if self.reference is None else self.reference.gb_s * (1 - self.margin)


def find_yardstick(
    bench: Bench, sweep: Sweep, all_sweeps: Sequence[Sweep], expect_gb_s: float | None, *, use_reference: bool
) -> Yardstick:
    """Return what to compare a curve with: --expect before the table, and nothing if ranks share a GPU."""
    found = _find(bench, sweep, expect_gb_s, use_reference=use_reference)
    measured = {curve_of(other.first) for other in all_sweeps}
    back_to_back = curve_of(replace(sweep.first, mode=Mode.THROUGHPUT)) in measured
    if sweep.first.mode is Mode.LATENCY and back_to_back and found.reference is not None:
        return Yardstick(reference=None, note="references are for back-to-back calls, as in throughput mode")
    return found


def _find(bench: Bench, sweep: Sweep, expect_gb_s: float | None, *, use_reference: bool) -> Yardstick:
    if shared := describe_shared_gpus(bench.members):
        return Yardstick(reference=None, note=shared)
    if expect_gb_s is not None:
        expected = Reference(gb_s=expect_gb_s, high_gb_s=None, text=EXPECT, source=EXPECT, min_size_bytes=0)
        return Yardstick(reference=expected, steady=bench.settings.backend == "gloo")
    if not use_reference:
        return Yardstick(reference=None, note="the comparison with references is disabled")
    return _look_up(bench, sweep)


def _look_up(bench: Bench, sweep: Sweep) -> Yardstick:
    names = sorted({member.device_name for member in bench.members})
    if all(member.device == "cpu" for member in bench.members):
        return Yardstick(
            reference=None, note=f"no reference for {bench.settings.backend} on CPUs: there is no known peak"
        )
    if len(names) > 1:
        return Yardstick(reference=None, note=f"no reference for mixed hardware: {', '.join(names)}")
    rows = [row for row in read_references() if row.gpu.fullmatch(names[0])]
    if not rows or bench.settings.backend != "nccl":
        return Yardstick(reference=None, note=f"no reference for this hardware: {bench.settings.backend} on {names[0]}")
    if sweep.first.dtype not in FLOATS or sweep.first.redop not in {None, "sum"}:
        return Yardstick(reference=None, note="the references are for sums of float32, float16 and bfloat16")
    return _choose(bench, sweep, names[0], rows)


def _choose(bench: Bench, sweep: Sweep, name: str, rows: list[KnownBandwidth]) -> Yardstick:
    ranks, nodes = len(bench.members), len({member.host for member in bench.members})
    fitting = [
        row for row in rows if row.ranks == ranks and row.nodes == nodes and row.collective is sweep.first.collective
    ]
    if not fitting:
        there = "; ".join(dict.fromkeys(f"{row.collective.value} of {row.ranks} on {row.nodes}" for row in rows))
        what = f"{sweep.first.collective.value} of {ranks} {name} on {count_of(nodes, 'host')}"
        return Yardstick(reference=None, note=f"no reference for {what} (available: {there})")
    off = _switched_off(bench)
    row = next((row for row in fitting if (row.algorithm == "ring") is bool(off)), fitting[0])
    reference = Reference(
        gb_s=row.low_gb_s,
        high_gb_s=row.high_gb_s,
        text=row.text,
        source=row.source,
        min_size_bytes=row.min_size_bytes,
    )
    return Yardstick(reference=reference, note=_beside(row, fitting, off), margin=REFERENCE_MARGIN)


def _switched_off(bench: Bench) -> str:
    """Return the variable that turns off reduction in the switch on some rank, or "" if it is on."""
    for member in bench.members:
        if member.variables.get("NCCL_NVLS_ENABLE", "").strip() == "0":
            return "NCCL_NVLS_ENABLE=0"
        algorithms = member.variables.get("NCCL_ALGO", "")
        if _rules_out_nvls(algorithms):
            return f"NCCL_ALGO={algorithms}"
    return ""


def _rules_out_nvls(algorithms: str) -> bool:
    """Return whether NCCL_ALGO excludes NVLS: "Ring,Tree", "^NVLS", "broadcast:ring;allreduce:tree,ring"."""
    for part in algorithms.lower().replace(" ", "").split(";"):
        collective, _, names = part.rpartition(":")
        if names and collective in {"", "allreduce"}:
            return ("nvls" in names.removeprefix("^").split(",")) is names.startswith("^")
    return False


def _beside(row: KnownBandwidth, fitting: list[KnownBandwidth], off: str) -> str:
    """Say what the other algorithm gives, if there are two."""
    other = next((one for one in fitting if one is not row), None)
    if other is None:
        return ""
    if row.algorithm == "ring":
        return f"{off} is set: without it, {other.low_gb_s:.0f} GB/s is typical"
    return f"a ring without NVLS (reduction in the switch) gives {other.low_gb_s:.0f} GB/s"
