"""What was measured as comma-separated values: a row a measurement, and nothing else on that stream."""

from __future__ import annotations

import csv
import io
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Measurement
from ddpdoctor.report.bandwidth.reading import read_bandwidth

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report

COLUMNS = (
    "collective",
    "dtype",
    "redop",
    "mode",
    "in_place",
    "size_bytes",
    "count",
    "iterations",
    "first_us",
    "min_us",
    "p50_us",
    "p95_us",
    "cv",
    "algbw_gb_s",
    "busbw_gb_s",
    "wrong",
)
"""Their names and order never change; later ones come behind them."""


def render_csv(report: Report) -> str:
    """Render a head and a row a measurement; what has no value is empty, truth is "true" and "false"."""
    later = [field.name for field in fields(Measurement) if field.name not in COLUMNS]
    text = io.StringIO()
    # The line ends of Unix: what reads this is a shell, a spreadsheet or pandas, and all of them take these.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *later])
    for row in read_bandwidth(report).results:
        writer.writerow([_write(getattr(row, name)) for name in (*COLUMNS, *later)])
    return text.getvalue()


def _write(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.value
    return value
