"""Published collective bandwidths of healthy systems: a table that gives the source of each figure.

The table is ``bandwidth_references.tsv`` beside this file. It is read on first use. Figures are the bus bandwidth of
nccl-tests in GB/s, for back-to-back calls that sum floats.
"""

from __future__ import annotations

import pkgutil
import re
from dataclasses import dataclass
from functools import cache

from ddpdoctor.model.bandwidth import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBandwidth:
    """A row of the table."""

    gpu: re.Pattern[str]
    """Matches the whole name that torch gives: "NVIDIA GH200" is not an H200, and a MIG slice is not a GPU."""
    ranks: int
    nodes: int
    collective: Collective
    algorithm: str
    """"nvls" or "ring"; empty if there is no choice."""
    low_gb_s: float
    """The lowest figure measured at ``min_size_bytes`` and above, or the lowest that a cloud accepts."""
    high_gb_s: float | None
    """The highest figure measured."""
    min_size_bytes: int
    text: str
    source: str
    checked: bool
    """Whether the figure was found at its source when the row was written."""


@cache
def read_references() -> tuple[KnownBandwidth, ...]:
    """Return the rows of the table."""
    table = pkgutil.get_data("ddpdoctor.model", "bandwidth_references.tsv") or b""
    _, *lines = table.decode("utf-8").splitlines()
    return tuple(map(_parse_row, lines))


def _parse_row(line: str) -> KnownBandwidth:
    gpu, ranks, nodes, collective, algorithm, low, high, min_size, text, source, checked = line.split("\t")
    return KnownBandwidth(
        gpu=re.compile(gpu), ranks=int(ranks), nodes=int(nodes), collective=Collective(collective),
        algorithm=algorithm, low_gb_s=float(low), high_gb_s=float(high) if high else None,
        min_size_bytes=int(min_size), text=text, source=source, checked=checked == "yes",
    )  # fmt: skip
