"""A run against a saved one: the sizes that matter, and a count of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size
from ddpdoctor.report.bandwidth.columns import Column, draw_columns, fit_columns
from ddpdoctor.report.bandwidth.words import format_share, format_us, name_series
from ddpdoctor.report.page import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Change, Comparison
    from ddpdoctor.report.page import Page

MAX_ROWS = 12
"""More rows do not help on a screen; the report file has them all."""


def add_comparison(page: Page, comparison: Comparison) -> None:
    """Add what got slower, what is not alike between the runs, and how many sizes are as they were."""
    page.gap()
    page.add(f"against {comparison.baseline}", style="bold")
    for difference in comparison.differences:
        page.add(f"not alike: {difference}", first="  ")
    matter = pick_changes(comparison.changes)
    for line in draw_columns(fit_columns(list_change_columns(matter[:MAX_ROWS]), page.width)) if matter else []:
        page.add(line, whole=True)
    if len(matter) > MAX_ROWS:
        page.add(f"and {len(matter) - MAX_ROWS} more rows in report.json", first="  ")
    page.add(count_changes(comparison), first="  ")


def pick_changes(changes: Sequence[Change]) -> list[Change]:
    """Pick the sizes that are below what was asked, then those that are slower beyond the noise, the worst first."""
    matter = [change for change in changes if change.below or change.ratio_high < 1]
    return sorted(matter, key=lambda change: (not change.below, change.ratio))


def list_change_columns(changes: Sequence[Change]) -> tuple[Column, ...]:
    """List the columns of a table of changes."""
    names = [name_series(change) for change in changes]
    width = max(map(len, names))
    return (
        _column("", "", [name.ljust(width) for name in names], weight=6),
        _column("", "", [change.mode.value for change in changes], weight=7),
        _column("size", "", [format_size(change.size_bytes) for change in changes], weight=9),
        _column("then", "us", [format_us(change.then_us) for change in changes], weight=4),
        _column("now", "us", [format_us(change.now_us) for change in changes], weight=4),
        _column("bandwidth", "now / then", [format_share(change.ratio) for change in changes], weight=10),
        _column("between", "", [_interval(change) for change in changes], weight=5),
        _column("", "", ["below" if change.below else "slower" for change in changes], weight=8),
    )


def count_changes(comparison: Comparison) -> str:
    """Count the sizes by how they changed: "2 below, 1 slower, 3 faster, 36 alike within the noise"."""
    changes = comparison.changes
    if not changes:
        return f"nothing to compare: {plural(comparison.missing, 'size')} not in the baseline"
    below = sum(change.below for change in changes)
    slower = sum(change.ratio_high < 1 and not change.below for change in changes)
    faster = sum(change.ratio_low > 1 for change in changes)
    alike = len(changes) - below - slower - faster
    counts = [
        (below, "below what was asked"),
        (slower, "slower"),
        (faster, "faster"),
        (alike, "alike within the noise"),
    ]
    missing = f"; {plural(comparison.missing, 'size')} not in the baseline" if comparison.missing else ""
    return f"{plural(len(changes), 'size')}: {', '.join(f'{count} {word}' for count, word in counts if count)}{missing}"


def _column(name: str, unit: str, cells: Sequence[str], *, weight: int) -> Column:
    return Column(group="", name=name, unit=unit, cells=tuple(cells), weight=weight)


def _interval(change: Change) -> str:
    return f"{format_share(change.ratio_low)} and {format_share(change.ratio_high)}"
