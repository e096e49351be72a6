"""The records of a report as comma-separated values, and nothing else on that stream."""

from __future__ import annotations

import csv
import io
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError
from ddpdoctor.report.contents import read_content

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report


def render_csv(report: Report) -> str:
    """Render a header and one row per record. None is empty, and booleans are "true" and "false".

    Raises ``UserError`` for a report without records.
    """
    records = read_content(report).records
    if records is None:
        raise UserError("this report has no table of measurements", help="--format json has everything.")
    text = io.StringIO()
    # Use Unix line ends, because shells, spreadsheets and pandas all accept them.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(records.names)
    writer.writerows([_write(value) for value in row] for row in records.rows)
    return text.getvalue()


def _write(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.value
    return value
