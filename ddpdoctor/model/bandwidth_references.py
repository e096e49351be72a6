"""What all-reduce and its like give on healthy systems that others have measured: a table, each figure with its source.

The table is ``bandwidth_references.tsv`` beside this file, and is read on first use. Figures are nccl-tests' bus
bandwidth in GB/s, of calls back to back on sums of floats.
"""

from __future__ import annotations

import pkgutil
import re
from dataclasses import dataclass
from functools import cache

from ddpdoctor.model.bandwidth import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A row of the table."""

    gpu: re.Pattern[str]
    """Of the whole name that torch gives: "NVIDIA GH200" is no H200, and a MIG slice no GPU."""
    ranks: int
    nodes: int
    collective: Collective
    algorithm: str
    """"nvls", "ring"; empty where there are not two."""
    low_gb_s: float
    """The least that was seen at ``min_size_bytes`` and beyond, or that a cloud lets pass."""
    high_gb_s: float | None
    """The most that was seen."""
    min_size_bytes: int
    text: str
    source: str
    checked: bool
    """Whether the figure was found at its source when the row was written."""


@cache
def read_references() -> tuple[Known, ...]:
    """Return the table."""
    table = pkgutil.get_data("ddpdoctor.model", "bandwidth_references.tsv") or b""
    _, *lines = table.decode("utf-8").splitlines()
    return tuple(map(_parse_row, lines))


def _parse_row(line: str) -> Known:
    gpu, ranks, nodes, collective, algorithm, low, high, min_size, text, source, checked = line.split("\t")
    return Known(
        gpu=re.compile(gpu), ranks=int(ranks), nodes=int(nodes), collective=Collective(collective),
        algorithm=algorithm, low_gb_s=float(low), high_gb_s=float(high) if high else None,
        min_size_bytes=int(min_size), text=text, source=source, checked=checked == "yes",
    )  # fmt: skip
