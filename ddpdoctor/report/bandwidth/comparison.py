"""The comparison of a run with a saved one: the sizes that changed, and a count of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ddpdoctor.model.amounts import format_size
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.report.bandwidth.numbers import format_share, format_us
from ddpdoctor.report.bandwidth.results import name_series
from ddpdoctor.report.blocks import Column, Heading, Table, items

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Change, Comparison
    from ddpdoctor.report.blocks import Section

MAX_ROWS = 12
"""More rows do not help on a screen. The report file has all of them."""


def comparison_section(comparison: Comparison) -> Section:
    """Return what got slower, how the setups of the runs differ, and how many sizes are unchanged."""
    matter = pick_changes(comparison.changes)
    more = [f"and {len(matter) - MAX_ROWS} more rows in report.json"] if len(matter) > MAX_ROWS else []
    return (
        Heading(text=f"against {comparison.baseline}"),
        items([f"not alike: {difference}" for difference in comparison.differences], "  "),
        *([Table(columns=list_change_columns(matter[:MAX_ROWS]))] if matter else []),
        items([*more, count_changes(comparison)], "  "),
    )


def pick_changes(changes: Sequence[Change]) -> list[Change]:
    """Pick the sizes below the requested limit, then those that are slower beyond the noise, the worst first."""
    matter = [change for change in changes if change.below or change.ratio_high < 1]
    return sorted(matter, key=lambda change: (not change.below, change.ratio))


def list_change_columns(changes: Sequence[Change]) -> tuple[Column, ...]:
    """List the columns of a table of changes."""
    return (
        _column("", "", [name_series(change) for change in changes], weight=6, align="left"),
        _column("", "", [change.mode.value for change in changes], weight=7),
        _column("size", "", [format_size(change.size_bytes) for change in changes], weight=9),
        _column("then", "us", [format_us(change.then_us) for change in changes], weight=4),
        _column("now", "us", [format_us(change.now_us) for change in changes], weight=4),
        _column("bandwidth", "now / then", [format_share(change.ratio) for change in changes], weight=10),
        _column("between", "", [_interval(change) for change in changes], weight=5),
        _column("", "", ["below" if change.below else "slower" for change in changes], weight=8),
    )


def count_changes(comparison: Comparison) -> str:
    """Count the sizes by how they changed: "2 below, 1 slower, 3 faster, 36 equal within the noise"."""
    changes = comparison.changes
    if not changes:
        return f"nothing to compare: {count_of(comparison.missing, 'size')} not in the baseline"
    below = sum(change.below for change in changes)
    slower = sum(change.ratio_high < 1 and not change.below for change in changes)
    faster = sum(change.ratio_low > 1 for change in changes)
    alike = len(changes) - below - slower - faster
    counts = [
        (below, "below the required share"),
        (slower, "slower"),
        (faster, "faster"),
        (alike, "equal within the noise"),
    ]
    missing = f"; {count_of(comparison.missing, 'size')} not in the baseline" if comparison.missing else ""
    return (
        f"{count_of(len(changes), 'size')}: {', '.join(f'{count} {word}' for count, word in counts if count)}{missing}"
    )


def _column(
    name: str, unit: str, cells: Sequence[str], *, weight: int, align: Literal["left", "right"] = "right"
) -> Column:
    return Column(name=name, unit=unit, cells=tuple(cells), weight=weight, align=align)


def _interval(change: Change) -> str:
    return f"{format_share(change.ratio_low)} and {format_share(change.ratio_high)}"
