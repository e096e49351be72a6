"""What a curve is compared with: the user's figure, measurements of others on the same hardware, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Mode, Reference, describe_shared_gpus
from ddpdoctor.model.bandwidth_references import read_references

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Bench
    from ddpdoctor.model.bandwidth_references import Known
    from ddpdoctor.rules.bandwidth.series import Series

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
    bench: Bench, series: Series, all_series: Sequence[Series], expect_gb_s: float | None, *, use_reference: bool
) -> Yardstick:
    """Return what to compare a curve with: --expect before the table, and nothing if ranks share a GPU."""
    found = _find(bench, series, expect_gb_s, use_reference=use_reference)
    latency = series.mode is Mode.LATENCY and any(_is_throughput_of(series, other) for other in all_series)
    if latency and found.reference is not None:
        return Yardstick(reference=None, note="references are of calls back to back, which throughput mode measures")
    return found


def _find(bench: Bench, series: Series, expect_gb_s: float | None, *, use_reference: bool) -> Yardstick:
    if shared := describe_shared_gpus(bench.members):
        return Yardstick(reference=None, note=shared)
    if expect_gb_s is not None:
        return Yardstick(reference=_expected(expect_gb_s), steady=bench.settings.backend == "gloo")
    if not use_reference:
        return Yardstick(reference=None, note="it is held to no reference, as asked for")
    return _look_up(bench, series)


def _is_throughput_of(series: Series, other: Series) -> bool:
    return other.mode is Mode.THROUGHPUT and (series.collective, series.dtype, series.redop, series.in_place) == (
        other.collective, other.dtype, other.redop, other.in_place
    )  # fmt: skip


def _expected(gb_s: float) -> Reference:
    return Reference(gb_s=gb_s, high_gb_s=None, text=EXPECT, source=EXPECT, min_size_bytes=0)


def _look_up(bench: Bench, series: Series) -> Yardstick:
    names = sorted({member.device_name for member in bench.members})
    if all(member.device == "cpu" for member in bench.members):
        return Yardstick(
            reference=None, note=f"no reference for {bench.settings.backend} on CPUs: there is no peak to hold it to"
        )
    if len(names) > 1:
        return Yardstick(reference=None, note=f"no reference for mixed hardware: {', '.join(names)}")
    rows = [row for row in read_references() if row.gpu.fullmatch(names[0])]
    if not rows or bench.settings.backend != "nccl":
        return Yardstick(reference=None, note=f"no reference for this hardware: {bench.settings.backend} on {names[0]}")
    if series.dtype not in FLOATS or series.redop not in {None, "sum"}:
        return Yardstick(reference=None, note="the references are of sums of float32, float16 and bfloat16")
    return _choose(bench, series, names[0], rows)


def _choose(bench: Bench, series: Series, name: str, rows: list[Known]) -> Yardstick:
    ranks, nodes = len(bench.members), len({member.host for member in bench.members})
    fitting = [row for row in rows if row.ranks == ranks and row.nodes == nodes and row.collective is series.collective]
    if not fitting:
        there = "; ".join(dict.fromkeys(f"{row.collective.value} of {row.ranks} on {row.nodes}" for row in rows))
        what = f"{series.collective.value} of {ranks} {name} on {nodes} {'host' if nodes == 1 else 'hosts'}"
        return Yardstick(reference=None, note=f"no reference for {what} (there is for {there})")
    off = _switched_off(bench)
    row = next((row for row in fitting if (row.algorithm == "ring") is bool(off)), fitting[0])
    note = _beside(row, fitting, off)
    return Yardstick(reference=_reference(row), note=note, margin=REFERENCE_MARGIN)


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


def _beside(row: Known, fitting: list[Known], off: str) -> str:
    """Say what the other algorithm gives, if there are two."""
    other = next((one for one in fitting if one is not row), None)
    if other is None:
        return ""
    if row.algorithm == "ring":
        return f"{off} is set: without it, {other.low_gb_s:.0f} GB/s have been seen"
    return f"a ring, without the reduction in the switch (NVLS), gives {other.low_gb_s:.0f} GB/s"


def _reference(row: Known) -> Reference:
    return Reference(
        gb_s=row.low_gb_s,
        high_gb_s=row.high_gb_s,
        text=row.text,
        source=row.source,
        min_size_bytes=row.min_size_bytes,
    )
