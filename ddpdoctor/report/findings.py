"""Turns findings and checks into words and blocks, and merges equal ones: ranks at one place, like findings."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import replace
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, TypeVar
from unicodedata import east_asian_width

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.pictures import SourceExcerpt
from ddpdoctor.model.words import count_of, format_numbers, grouped
from ddpdoctor.report.blocks import FactEntry, FactList, Heading, Places, RankClass, Tone
from ddpdoctor.report.lines import format_hosts, format_place, merge_places, sureness_of, title_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ddpdoctor.model.findings import Check, Finding, RankRow, Report
    from ddpdoctor.report.blocks import Section

# Matches the beginning of a fix that is a command, not a sentence.
COMMAND = re.compile(
    r"(chmod|ddpdoctor|docker|echo|export|ip|iptables|kubectl|ln|mkdir|modprobe|mount|nft|nvidia-smi|pip|python3?|rm"
    r"|scontrol|sed|srun|sudo|sysctl|systemctl|torchrun|ulimit|unset)\s"
)
TONES = {Severity.ERROR: Tone.ERROR, Severity.WARNING: Tone.WARNING, Severity.INFO: Tone.NOTE}
OUTCOME_WORDS = {
    Outcome.PASSED: "passed",
    Outcome.FAILED: "failed",
    Outcome.SKIPPED: "skipped",
    Outcome.INCONCLUSIVE: "could not tell",
    Outcome.CRASHED: "crashed",
}
OUTCOME_TONES = {
    Outcome.PASSED: Tone.GOOD,
    Outcome.FAILED: Tone.ERROR,
    Outcome.SKIPPED: Tone.SKIPPED,
    Outcome.INCONCLUSIVE: Tone.WARNING,
    Outcome.CRASHED: Tone.CRASHED,
}
# Outcomes of checks without an answer. They must not read like "passed".
UNKNOWN = frozenset({Outcome.INCONCLUSIVE, Outcome.CRASHED})
LABEL_WIDTH = 8
# Names in a verdict that may be calls on its line. Others are words too: in "step 11", step is not a call.
_CALLED = re.compile(r"\b(?:\w+_\w+|backward|barrier|broadcast|reduce|gather|scatter|send|recv|item)\b")
_CALL = re.compile(r"\b[\w.]*\w(?=\s*\()")


Kind = TypeVar("Kind")


def read_part(kind: type[Kind], plain: Any, what: str) -> Kind | None:
    """Return a part of a report's data, or None if the report lacks it. Raises ``UserError`` that names ``what``."""
    try:
        return None if plain is None else decode(kind, plain)
    except (WrongValue, TypeError) as error:
        raise UserError(f"the {what} in the report cannot be read: {error}") from error


def read_picture(kind: type[Kind], plain: Any) -> Kind | None:
    """Return what a picture is drawn from, or None if the report lacks it or is damaged there."""
    try:
        return read_part(kind, plain, "")
    except UserError:
        return None


def severity_word(severity: Severity) -> str:
    return "note" if severity is Severity.INFO else severity.value


def verdict_section(report: Report, verdict: Finding) -> Section:
    """Return what backs the verdict of a job. The problem itself is the headline of the report."""
    title = f"{title_of(verdict)} ({sureness_of(verdict)})"
    known = {"step": verdict.step, "tensor": verdict.tensor}
    inside = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    where, *facts = finding_facts(verdict, (inside,) if inside else (), explain=True)
    source = read_picture(SourceExcerpt, report.data.get("source"))
    if source is not None and (source.file, source.blamed) in [(place.file, place.line) for place in verdict.where[:1]]:
        where = replace(where, code=draw_source(source, 1, _CALLED.findall(verdict.summary)))
    return (Heading(title, tone=TONES[verdict.severity]), FactList((where, *facts), width=LABEL_WIDTH))


def draw_source(source: SourceExcerpt, around: int, calls: Collection[str] = ()) -> tuple[str, ...]:
    """Draw the blamed line and ``around`` lines on each side, numbered, with a mark below what the blamed line calls.

    That is the first call whose name is in ``calls``, or the only one; else its first character is marked.
    """
    digits, drawn = len(str(source.first + len(source.lines))), []
    lines = textwrap.dedent("\n".join(source.lines)).split("\n")
    for number, line in enumerate(lines, start=source.first):
        if abs(number - source.blamed) <= around:
            drawn.append(f"{number:{digits}} | {line}".rstrip())
        if number == source.blamed:
            found = [call for call in _CALL.finditer(line) if not iskeyword(call[0])]
            named = [call for call in found if call[0].rpartition(".")[2] in calls]
            blank = len(line) - len(line.lstrip())
            likely = named or (found if len(found) == 1 else [])
            start, end = likely[0].span() if likely else (blank, blank + 1)
            before = "".join("  " if east_asian_width(char) in "WF" else " " for char in line[:start])
            drawn.append(f"{' ' * digits} | {before}{'^' * (end - start)}")
    return tuple(drawn)


def finding_facts(finding: Finding, more_places: tuple[str, ...] = (), *, explain: bool) -> tuple[FactEntry, ...]:
    # A command with inserted line breaks could not be pasted, so the terminal wraps it.
    is_command = COMMAND.match(finding.fix) is not None
    return (
        FactEntry("where", (*merge_places(finding.where), *more_places)),
        FactEntry("seen", finding.evidence),
        FactEntry("to do", (finding.fix,) if finding.fix else (), whole=is_command),
        FactEntry("more", (f"ddpdoctor explain {finding.code}",) if explain else ()),
    )


def name_check(check: Check) -> str:
    """Return the code and kind of a check: "DD121 shm"."""
    return f"{check.code} {check.id}".strip()


def check_words(check: Check) -> str:
    """Return what a check found, or why it has no answer, with its hosts."""
    where = f"on {format_hosts(check.hosts)}: " if check.hosts else ""
    return where + (check.seen or check.reason)


def count_findings(findings: Iterable[Finding]) -> str:
    """Count findings by severity: "1 error, 2 notes". Empty if there are none."""
    severities = [finding.severity for finding in findings]
    counts = ((severities.count(severity), severity_word(severity)) for severity in Severity)
    return ", ".join(count_of(count, word) for count, word in counts if count)


def count_checks(report: Report) -> str:
    """Count checks by outcome: "20 passed, 9 skipped"."""
    counts = Counter(check.outcome for check in report.checks)
    always = (Outcome.PASSED, Outcome.SKIPPED)
    shown = [each for each in OUTCOME_WORDS if each in always or (each in UNKNOWN and counts[each])]
    return ", ".join(f"{counts[outcome]} {OUTCOME_WORDS[outcome]}" for outcome in shown)


def places_of(ranks: tuple[RankRow, ...], verdict: Finding | None) -> tuple[Section, ...]:
    """Return a section of where the ranks are, by lowest rank, those that the verdict blames apart; or nothing."""
    blamed = frozenset(verdict.ranks) if verdict else frozenset()
    several = len({row.host for row in ranks}) > 1
    ordered = sorted(ranks, key=lambda row: row.rank)
    classes = grouped(
        ((row.state, format_place(row.where) if row.where else "", row.rank in blamed), row) for row in ordered
    )
    found = []
    for (state, line, is_blamed), rows in classes.items():
        hosts, steps = {row.host for row in rows}, {row.step for row in rows if row.step is not None}
        words = f"{'step' if len(steps) == 1 else 'steps'} {format_numbers(steps)}" if steps else ""
        found.append(
            RankClass(
                ranks=tuple(row.rank for row in rows),
                host=rows[0].host if several and len(hosts) == 1 else "",
                state=state,
                place=", ".join(part for part in (line, words) if part),
                blamed=is_blamed,
            )
        )
    return ((Places(classes=tuple(found)),),) if ranks else ()


def merge_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings that differ only in ranks, hosts and places. They keep the order of first appearance."""
    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.kind, finding.severity, finding.summary, finding.fix)
        former = merged.get(key)
        merged[key] = (
            finding
            if former is None
            else replace(
                former,
                ranks=tuple(sorted({*former.ranks, *finding.ranks})),
                hosts=tuple(sorted({*former.hosts, *finding.hosts})),
                where=former.where + finding.where,
            )
        )
    return tuple(merged.values())
