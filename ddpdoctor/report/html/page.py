"""Renders a report as one self-contained HTML page. Collected data is always escaped, never markup."""

from __future__ import annotations

import base64
import hashlib
import itertools
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.sides import grouped
from ddpdoctor.report.classes import merge_findings
from ddpdoctor.report.contents import read_content
from ddpdoctor.report.findings import (
    COMMAND,
    OUTCOME_TONES,
    OUTCOME_WORDS,
    TONES,
    UNKNOWN,
    check_words,
    count_checks,
    severity_word,
)
from ddpdoctor.report.html.blocks import BlockDrawer
from ddpdoctor.report.html.parts import list_parts
from ddpdoctor.report.lines import clean
from ddpdoctor.report.names import format_hosts, format_place, format_ranks, format_time, title_of

if TYPE_CHECKING:
    from jinja2 import Environment

    from ddpdoctor.model.findings import Finding, Place, Report
    from ddpdoctor.report.blocks import Column, Content, Table

FOLDER = Path(__file__).parent
SCRIPTS = ("page.js", "timeline_data.js", "timeline_drawing.js", "timeline.js")
"""Joined in this order to the one script of a page."""
CHECK_ORDER = (Outcome.FAILED, Outcome.CRASHED, Outcome.INCONCLUSIVE, Outcome.PASSED, Outcome.SKIPPED)


def render_html(report: Report) -> str:
    """Render the page. It loads nothing from elsewhere. Raises ``UserError`` if the report is damaged."""
    content = read_content(report)
    folder = find_folder(report)
    env = make_environment(folder)
    style, script = read_file("page.css"), "".join(map(read_file, SCRIPTS))
    return env.get_template("page.html.jinja").render(
        report=report,
        content=content,
        title=" ".join(part for part in ("ddpdoctor", content.verb or _verb(report)) if part),
        verdict=report.verdict,
        headline=content.headline,
        tone=_tone(report),
        parts=list_parts(content),
        others=_others(report, content),
        draw=BlockDrawer(env, folder).draw,
        folder=folder,
        style=style,
        script=script,
        policy=_policy(style, script),
        counts=count_checks(report),
        checks=sorted(report.checks, key=lambda check: CHECK_ORDER.index(check.outcome)),
        has_unknown=any(check.outcome in UNKNOWN for check in report.checks),
    )


def find_folder(report: Report) -> Path | None:
    """Return the folder of the user's code. Paths below it are shown without it, save in the verdict and commands."""
    places = [*(report.verdict.where if report.verdict else ()), *(row.where for row in report.ranks if row.where)]
    folder = PurePosixPath(places[0].file).parent if places else PurePosixPath()
    return Path(folder) if folder.is_absolute() and folder.parent != folder else None


def make_environment(folder: Path | None = None) -> Environment:
    """Return the environment of the templates. It escapes what is not markup of its own.

    Paths below ``folder`` lose it, unless the filter ``whole`` keeps them.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import escape

    env = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=partial(_finalize, folder),
    )
    env.filters |= {
        "ranks": format_ranks, "hosts": format_hosts, "time": format_time, "word": severity_word,
        "tone": lambda severity: TONES[severity].value, "outcome_tone": lambda outcome: OUTCOME_TONES[outcome].value,
        "outcome_word": OUTCOME_WORDS.get, "is_command": lambda fix: COMMAND.match(fix) is not None,
        "whole": lambda text: escape(clean(text)),
        "title_of": title_of, "check_words": check_words, "by_place": _by_place, "by_group": _by_group, "rows": _rows,
    }  # fmt: skip
    return env


def _by_place(where: tuple[Place, ...]) -> list[tuple[tuple[int, ...], Place]]:
    """Return each line of code once, with its ranks."""
    places = {format_place(place): place for place in reversed(where)}
    ranks = grouped((format_place(place), place.rank) for place in where)
    return [(tuple(at), places[line]) for line, at in ranks.items()]


def _by_group(columns: tuple[Column, ...]) -> list[tuple[str, int]]:
    """Return the groups over the columns, with the number of columns of each."""
    return [(group, len(list(members))) for group, members in itertools.groupby(column.group for column in columns)]


def _rows(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def _finalize(folder: Path | None, value: Any) -> Any:
    """Show control and bidi characters of a plain text. Markup has been through this already."""
    return value if hasattr(value, "__html__") or not isinstance(value, str) else clean(value, folder)


@cache
def read_file(name: str) -> str:
    """Return a file of this package."""
    return (FOLDER / name).read_text(encoding="ascii")


def _policy(style: str, script: str) -> str:
    """Return a policy under which nothing runs but the page's own script, and nothing is loaded."""
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _verb(report: Report) -> str:
    """Return the command that made a report, for the title."""
    words = report.command[1:2]
    return words[0] if words and words[0].replace("-", "").isalpha() else ""


def _tone(report: Report) -> str:
    """Return what the headline means to the reader."""
    if report.verdict is not None:
        return TONES[report.verdict.severity].value
    if report.job is not None and report.job.ended_badly:
        return "warning"
    answered = any(check.outcome is Outcome.PASSED for check in report.checks)
    return "good" if answered or not report.checks else "note"


def _others(report: Report, content: Content) -> tuple[Finding, ...]:
    """Return the findings beside the verdict, the worst first."""
    found = content.others if content.ends_with_verdict else report.findings
    ordered = sorted(found, key=lambda finding: list(Severity).index(finding.severity))
    return merge_findings(finding for finding in ordered if finding != report.verdict)
