"""What changes are predicted to gain: the table below the time budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.predictions import Bound, PredictedStep
from ddpdoctor.report.blocks import Column, Heading, Table, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Block

LEAST_GAIN = 0.05
"""Of the step. Our choice: predictions are off by about as much."""
MOST_ROWS = 5


def prediction_blocks(report: Report) -> tuple[Block, ...]:
    """Return the table of the changes that gain most, or nothing if none gains enough.

    Raises:
        UserError: the report is damaged.
    """
    predictions = read_predictions(report)
    shown = [one for one in predictions if one.gain >= LEAST_GAIN][:MOST_ROWS]
    refused = next((one.reason for one in predictions if one.reason), "")
    if not shown:
        return ()
    blocks: tuple[Block, ...] = (Heading(text="what a change would gain (predicted)"), _table(shown))
    if not refused:
        return blocks
    return (*blocks, Text(text=f"Other settings of DDP cannot be predicted here: {refused}", indent=2))


def read_predictions(report: Report) -> tuple[PredictedStep, ...]:
    """Return the predictions in a report, the largest gain first.

    Raises:
        UserError: the report is damaged.
    """
    try:
        return tuple(decode(PredictedStep, one) for one in (report.data.get("speed") or {}).get("predictions") or ())
    except (WrongValue, TypeError) as error:
        raise UserError(f"the predictions in the report cannot be read: {error}") from error


def _table(shown: Sequence[PredictedStep]) -> Table:
    return Table(
        indent=2,
        columns=(
            Column(name="change", cells=tuple(one.change for one in shown), align="left"),
            Column(name="shorter step", cells=tuple(_gain(one) for one in shown)),
            Column(name="if", cells=tuple(one.assumes for one in shown), align="left", weight=1),
        ),
    )


def _gain(one: PredictedStep) -> str:
    """Return the gain as a range: "31% to 40%"."""
    if one.bound is not Bound.RANGE:
        return f"{one.bound.value} {one.gain:.0%}"
    ends = [f"{max(0.0, 1 - ratio):.0%}" for ratio in (one.high, one.low) if ratio is not None]
    return " to ".join(dict.fromkeys(ends))
