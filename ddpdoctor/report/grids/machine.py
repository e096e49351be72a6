"""The grid of checks by hosts: hosts with equal results share a column, and so do checks without a problem a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.rank_words import first_names
from ddpdoctor.model.sides import grouped, majority_of
from ddpdoctor.report.blocks import GridCell, Tone
from ddpdoctor.report.findings import OUTCOME_TONES, OUTCOME_WORDS, TONES, name_check, severity_word
from ddpdoctor.report.grids.build import MARK, MAX_ROWS, grid_by_member, not_shown
from ddpdoctor.report.names import format_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddpdoctor.model.findings import Check, Finding, Report
    from ddpdoctor.report.blocks import Section
    from ddpdoctor.report.grids.build import Row

DIFFERS = f"{MARK}hosts with other results than most"
QUIET = (Outcome.PASSED, Outcome.SKIPPED)
MAX_NAMED = 12
"""How many of the checks of a row are named."""


def machine_pictures(report: Report) -> tuple[Section, ...]:
    """Return the grid of checks by hosts. Nothing if the report is not about machines."""
    named = report.data.get("hosts")
    hosts = list(dict.fromkeys(one for one in named if isinstance(one, str))) if isinstance(named, list) else []
    if not hosts or not report.checks:
        return ()
    rows = list(_rows(report, hosts))
    shown = rows[:MAX_ROWS]
    sides = list(grouped((tuple(cells[at] for _, cells in shown), at) for at in range(len(hosts))).values())
    most = frozenset(majority_of(sides))
    marked = len(sides) > 1 and bool(most)

    def name(those: Sequence[int]) -> str:
        differs = marked and those[0] not in most
        return (MARK if differs else "") + format_hosts(hosts[at] for at in those)

    grid = grid_by_member(
        "checks by host",
        shown,
        range(len(hosts)),
        name,
        axes=("check", "host"),
        legend=(*((DIFFERS,) if marked else ()), *not_shown(len(rows) - len(shown), "check")),
    )
    return ((grid,),)


def _rows(report: Report, hosts: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of each group: those of checks that say something, then counts of the others by outcome."""
    by_kind = grouped((one.kind, one) for one in report.findings)
    for group, checks in grouped((check.group, check) for check in report.checks).items():
        quiet = [check for check in checks if _is_quiet(check, by_kind)]
        yield from (_check_row(check, by_kind.get(check.id, []), hosts) for check in checks if check not in quiet)
        for outcome in QUIET:
            those = [check for check in quiet if check.outcome is outcome]
            if those:
                yield _count_row(group, outcome, those, len(hosts))


def _is_quiet(check: Check, by_kind: Mapping[str, Sequence[Finding]]) -> bool:
    return check.outcome in QUIET and not check.hosts and check.id not in by_kind


def _count_row(group: str, outcome: Outcome, checks: Sequence[Check], hosts: int) -> Row:
    word = OUTCOME_WORDS[outcome]
    cell = GridCell(
        text=word, tone=OUTCOME_TONES[outcome], about=first_names([name_check(check) for check in checks], MAX_NAMED)
    )
    return f"{_group(group)}{len(checks)} {word}", dict.fromkeys(range(hosts), cell)


def _check_row(check: Check, findings: Sequence[Finding], hosts: Sequence[str]) -> Row:
    placed = frozenset(check.hosts)
    by_host = grouped((host, one) for one in findings for host in (one.hosts or ("",)))
    return f"{_group(check.group)}{name_check(check)}", {
        at: _cell(check, [*by_host.get(host, ()), *by_host.get("", ())], placed, host, found=bool(findings))
        for at, host in enumerate(hosts)
    }


def _cell(check: Check, own: Sequence[Finding], placed: frozenset[str], host: str, *, found: bool) -> GridCell:
    if own:
        worst = min((one.severity for one in own), key=lambda one: one.order)
        about = "; ".join(one.summary for one in own)
        return GridCell(text=severity_word(worst), tone=TONES[worst], about=about)
    everywhere = not placed and (not found or check.outcome is Outcome.PASSED)
    if everywhere or host in placed:
        return GridCell(
            text=OUTCOME_WORDS[check.outcome], tone=OUTCOME_TONES[check.outcome], about=check.seen or check.reason
        )
    if check.outcome is Outcome.PASSED:
        return GridCell(text=OUTCOME_WORDS[Outcome.SKIPPED], tone=Tone.SKIPPED)
    return GridCell(text="-", about="no problem known here")


def _group(group: str) -> str:
    return f"{group}: " if group else ""
