"""Formats that programs read: JSON, CSV, JUnit, SARIF, GitHub's annotations, Prometheus' metrics; and Markdown."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from ddpdoctor import __version__
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import SCHEMA_VERSION, Outcome, Report, Severity
from ddpdoctor.model.pictures import SourceExcerpt
from ddpdoctor.model.words import grouped
from ddpdoctor.report.blocks import FactList, Heading, Items, Places, Table, Text, Tree, read_content
from ddpdoctor.report.findings import OUTCOME_WORDS, UNKNOWN, check_words, draw_source, name_check
from ddpdoctor.report.lines import (
    blamed_by,
    clean,
    cleaned,
    format_ranks,
    format_time,
    merge_places,
    path_from,
    sureness_of,
    title_of,
)
from ddpdoctor.report.text import fit_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ddpdoctor.model.findings import Finding
    from ddpdoctor.model.live import Sample
    from ddpdoctor.report.blocks import Block, Section, TreeNode


def render_csv(report: Report) -> str:
    """Render a header and one row per record. Raises ``UserError`` for a report without records."""
    records = read_content(report).records
    if records is None:
        raise UserError("this report has no table of measurements", help="--format json has everything.")
    text = io.StringIO()
    # Use Unix line ends, because shells, spreadsheets and pandas all accept them.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(records.names)
    for row in records.rows:
        plain = (value.value if isinstance(value, Enum) else value for value in row)
        writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in plain])
    return text.getvalue()


TOOL_NAME = "ddpdoctor"
_HELP = "Give a run folder that ddpdoctor wrote. Of a damaged one, the rings may still be there: remove report.json "
_HELP += "and run `ddpdoctor report` on the folder again."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool:
    """The program that wrote a report."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The fields that are checked before the rest of a report is read."""

    schema_version: int
    tool: _Tool


def report_to_dict(report: Report) -> dict[str, Any]:
    body = encode(report)
    del body["tool_version"]
    tool = {"name": TOOL_NAME, "version": report.tool_version or __version__}
    return {"schema_version": SCHEMA_VERSION, "tool": tool, **body}


def render_json(report: Report) -> str:
    return write_json(report_to_dict(report), indent=2)


def write_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON text with a final newline. It is pure ASCII, so any stream can carry it.

    Two # may begin a command of a CI runner. They are written so that only JSON reads them as two.
    """
    return json.dumps(value, indent=indent, allow_nan=False).replace("##", "\\u0023#") + "\n"


def parse_report(text: str) -> Report:
    """Read a report back. Raises ``UserError`` if the text is damaged, truncated, or not a report of ddpdoctor."""
    try:
        plain = json.loads(text)
        if not isinstance(plain, dict) or not {"schema_version", "tool"} <= plain.keys():
            raise WrongValue("it is not a report of ddpdoctor")  # noqa: TRY301 - all are said in one way
        header = decode(_Header, plain)
        if (name := header.tool.name) != TOOL_NAME:
            raise WrongValue(f"it was written by {name!r}, not by ddpdoctor")  # noqa: TRY301
        if (version := header.schema_version) != SCHEMA_VERSION:
            words = f"it has schema version {version}, and this ddpdoctor reads {SCHEMA_VERSION}"
            raise WrongValue(words)  # noqa: TRY301
        return decode(Report, plain | {"tool_version": header.tool.version})
    except json.JSONDecodeError as error:
        problem = f"not complete JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        problem = "nested too deeply to be a report"
    except ValueError as error:  # a number with thousands of digits
        problem = str(error).partition(";")[0]
    except WrongValue as error:
        problem = str(error)
    raise UserError(f"the report cannot be read: {problem}", help=_HELP)


ANNOTATIONS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
# Escapes as in https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts.
_IN_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_IN_PROPERTY = _IN_MESSAGE | str.maketrans({":": "%3A", ",": "%2C"})


def render_github(report: Report, cwd: Path | None) -> str:
    """Render one line per finding, and one per check without an answer; without findings, the headline."""
    content = read_content(report)
    commands = []
    for finding in report.findings:
        properties = {}
        for place in finding.where[:1]:
            properties["file"] = path_from(place.file, cwd)
            if place.line > 0:  # GitHub counts lines from 1. A line that is not known is 0 in a report.
                properties["line"] = str(place.line)
        properties["title"] = f"{finding.code} {finding.kind}"
        blamed, places = blamed_by(finding).removeprefix("on "), merge_places(finding.where)
        lines = [
            finding.summary,
            *([f"blamed: {blamed}"] if blamed else []),
            sureness_of(finding),
            *(f"at {place}" for place in places if len(places) > 1),
            *([f"to do: {finding.fix}"] if finding.fix else []),
            f"more: ddpdoctor explain {finding.code}",
        ]
        commands.append(_write_command(finding.severity, properties, clean("\n".join(lines), cwd)))
    if not commands:
        ended_badly = report.job is not None and report.job.ended_badly
        severity = Severity.ERROR if ended_badly else Severity.INFO
        commands = [_write_command(severity, {"title": TOOL_NAME}, content.headline)]
    for check in report.checks if content.is_checklist else ():
        if check.outcome in UNKNOWN:
            words = f"{OUTCOME_WORDS[check.outcome]}: {check_words(check)}"
            commands.append(_write_command(Severity.WARNING, {"title": name_check(check)}, words))
    return "".join(f"{command}\n" for command in commands)


def _write_command(severity: Severity, properties: dict[str, str], message: str) -> str:
    written = ",".join(f"{name}={value.translate(_IN_PROPERTY)}" for name, value in properties.items())
    return f"::{ANNOTATIONS[severity]} {written}::{message.translate(_IN_MESSAGE)}"


def render_junit(report: Report, fail_on: Severity | None) -> str:
    """Render one test case per check. Findings below ``fail_on`` (None: nothing fails) are output, not failures."""
    # All texts are cleaned, because XML does not allow control characters even as references.
    suite = Element("testsuite", name="ddpdoctor")
    if report.job is not None:  # how the job ended, because a job may fail without a finding
        job = report.job
        case = SubElement(suite, "testcase", classname="ddpdoctor.job", name="the job finishes", time="0")
        if job.ended_badly:
            status = "" if job.exit_status is None else f", exit status {job.exit_status}"
            SubElement(case, "failure", type="error", message=f"{job.status.value}{status}")
    for check in report.checks:
        group = f"ddpdoctor.{check.group or 'checks'}"
        case = SubElement(suite, "testcase", classname=group, name=name_check(check), time="0")
        own = [finding for finding in report.findings if check.id in {finding.kind, finding.code}]
        bad = [finding for finding in own if fail_on is not None and finding.severity.order <= fail_on.order]
        if bad:
            failure = SubElement(case, "failure", type=bad[0].severity.value, message=clean(bad[0].summary))
            failure.text = "\n\n".join(map(_case_text, own))
        elif check.outcome is Outcome.SKIPPED:
            SubElement(case, "skipped", message=clean(check.reason))
        elif check.outcome in UNKNOWN:
            SubElement(case, "error", type=check.outcome.value, message=clean(check.reason))
        else:
            SubElement(case, "system-out").text = "\n\n".join([clean(check.seen), *map(_case_text, own)])
    kinds = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {name: str(sum(case.find(tag) is not None for case in suite)) for name, tag in kinds.items()}
    suite.attrib.update(tests=str(len(suite)), **counts)
    began, ended = _time(report.started_at), _time(report.ended_at)
    if began is not None and ended is not None:
        suite.attrib.update(time=f"{ended - began:.3f}", timestamp=report.started_at)
    root = Element("testsuites", name="ddpdoctor")
    root.append(suite)
    indent(root)
    return "<?xml version='1.0' encoding='UTF-8'?>\n" + tostring(root, encoding="unicode") + "\n"


def _time(stamp: str) -> float | None:
    """Return a time in seconds, or None if it is malformed, as in a damaged file."""
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def _case_text(finding: Finding) -> str:
    lines = [f"{finding.severity.value} {title_of(finding)} ({sureness_of(finding)}): {finding.summary}"]
    lines += [f"seen: {line}" for line in finding.evidence]
    return clean("\n".join([*lines, f"to do: {finding.fix}"] if finding.fix else lines))


ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


def render_metrics(samples: Iterable[Sample]) -> str:
    """Return the text. Samples of one metric stand together, below its type, and have no time."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.metric.name, []).append(sample)
    lines = []
    for name, those in by_name.items():
        lines += [f"# HELP {name} {those[0].metric.help}", f"# TYPE {name} gauge"]
        for sample in those:
            # What is not Unicode, as a file name may be, would make the whole file invalid.
            values = [value.encode("utf-8", "replace").decode().translate(ESCAPES) for _, value in sample.labels]
            labels = ",".join(f'{label}="{value}"' for (label, _), value in zip(sample.labels, values, strict=True))
            lines.append(f"{name}{{{labels}}} {sample.value}")
    return "\n".join([*lines, "# EOF", ""])


VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
HOME = "https://github.com/ddpdoctor/ddpdoctor"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
ROOT = "%SRCROOT%"  # the folder that relative paths start from; whoever reads the file knows it (3.14.14)
# The fields of a finding that SARIF has no place for. They stand in the properties of its result.
KEPT = ("ranks", "hosts", "confidence", "origin", "step", "tensor", "share", "evidence", "fix")


def render_sarif(report: Report, titles: Mapping[str, str], cwd: Path | None) -> str:
    """Render one result per finding. ``titles`` has the line for lists of each rule, by code."""
    codes, rules = [], []
    for finding in {finding.code: finding for finding in report.findings}.values():
        code = clean(finding.code)
        page = f"{HOME}/blob/main/docs/rules/{quote(f'{finding.code}-{finding.kind}.md', errors='replace')}"
        codes.append(finding.code)
        rules.append({
            "id": code,
            "name": clean(finding.kind),
            "shortDescription": {"text": clean(titles.get(finding.code, finding.kind))},
            "help": {"text": f"ddpdoctor explain {code} says what it means and what to do.\n{page}"},
            "helpUri": page,
        })  # fmt: skip
    driver = {
        "name": "ddpdoctor", "version": clean(report.tool_version or __version__), "informationUri": HOME,
        "rules": rules,
    }  # fmt: skip
    # Checks without an answer are notifications (3.20.21).
    unknown = [check for check in report.checks if check.outcome in UNKNOWN]
    invocation = {
        "executionSuccessful": all(check.outcome is not Outcome.CRASHED for check in unknown),
        "toolExecutionNotifications": [
            {
                "level": "error" if check.outcome is Outcome.CRASHED else "warning",
                "message": _message(f"{name_check(check)}: {OUTCOME_WORDS[check.outcome]}: {check_words(check)}"),
            }
            for check in unknown
        ],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [_draw_result(finding, codes.index(finding.code), cwd) for finding in report.findings],
    }
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _draw_result(finding: Finding, rule_index: int, cwd: Path | None) -> dict[str, Any]:
    """Return a result. Its further places are related: to mend the first one is enough (3.27.12)."""
    ranks = grouped(((place.file, place.line, place.function), place.rank) for place in finding.where)
    places = {(place.file, place.line, place.function): place for place in finding.where}
    drawn: list[dict[str, Any]] = []
    for key, place in places.items():
        file = path_from(place.file, cwd)
        path = quote(file, errors="replace")
        artifact = {"uri": f"file://{path}"} if file.startswith("/") else {"uri": path, "uriBaseId": ROOT}
        # Lines count from 1 (3.30.5). A line that is not known is 0 in a report.
        region: dict[str, Any] = {"region": {"startLine": place.line}} if place.line > 0 else {}
        function = [{"name": clean(place.function), "kind": "function"}] if place.function else []
        shown: dict[str, Any] = {
            "physicalLocation": {"artifactLocation": artifact, **region},
            **({"logicalLocations": function} if function else {}),
            "message": {"text": format_ranks(ranks[key])},
        }
        drawn.append(shown)
    text = "\n".join([finding.summary, *([f"To do: {finding.fix}"] if finding.fix else [])])
    return {
        "ruleId": clean(finding.code),
        "ruleIndex": rule_index,
        "level": LEVELS[finding.severity],
        "message": _message(text),
        **({"locations": drawn[:1]} if drawn else {}),
        **({"relatedLocations": drawn[1:]} if drawn[1:] else {}),
        "properties": {name: value for name, value in cleaned(encode(finding)).items() if name in KEPT},
    }


def _message(text: str) -> dict[str, str]:
    """Return a message. What was collected is neither a placeholder (3.11.5) nor a link (3.11.6)."""
    return {"text": re.sub(r"\{(\d+)\}", r"{{\1}}", clean(text)).replace("](", "\\](")}


# Width of tables, as on a screen. Wider tables would scroll sideways in issues. report.json has all columns.
WIDTH = 110


def render_markdown(report: Report) -> str:
    """Render what was checked, the findings (worst first), the results, and a table of all checks."""
    content = read_content(report)
    title = " ".join(part for part in ("ddpdoctor", content.verb) if part)
    parts = [f"## {title}: {_inline(content.headline)}", *_write_sections(content.about)]
    for finding in report.findings:
        head = f"### {finding.severity.value}: {_inline(title_of(finding))} ({sureness_of(finding)})"
        lines = [head, "", _inline(finding.summary), ""]
        lines += [f"- at {_inline(place)}" for place in merge_places(finding.where)]
        lines += [f"- {_inline(line)}" for line in finding.evidence]
        lines += ["", "To do:", "", _indent([finding.fix])] if finding.fix else []
        parts.append("\n".join(lines))
    parts += [_write_block(block) for block in content.pictures if isinstance(block, SourceExcerpt | Tree)]
    parts += _write_sections(content.sections)
    if report.checks:
        rows = []
        for check in sorted(report.checks, key=lambda check: list(Outcome).index(check.outcome)):
            quoted = re.sub(r"[`|\s]+", " ", clean(check.id))  # without what would end the inline code or the cell
            seen = _inline(check_words(check))
            rows.append((OUTCOME_WORDS[check.outcome], _inline(check.code), f"`{quoted}`", seen))
        table = _draw_rows(("outcome", "code", "check", "seen"), ["---"] * 4, rows)
        parts.append(f"<details><summary>All checks</summary>\n\n{table}\n\n</details>")
    parts.append(f"ddpdoctor {_inline(report.tool_version)}, {_inline(format_time(report.started_at))}")
    return "\n\n".join(parts) + "\n"


def _write_sections(sections: Iterable[Section]) -> list[str]:
    return [written for section in sections for block in section if (written := _write_block(block))]


def _write_block(block: Block) -> str:
    match block:
        case Heading():
            return f"### {_inline(block.text)}"
        case Text():
            return _inline(block.text)
        case Items():
            return "\n".join(_write_item(item.text, [item.fix] if item.fix else []) for item in block.items)
        case FactList():
            facts = [fact for fact in block.facts if fact.texts]
            return "\n".join(_write_item(f"{fact.label}: {fact.texts[0]}", fact.texts[1:]) for fact in facts)
        case Table():
            columns = fit_columns(block.columns, WIDTH)
            groups = len({column.group for column in columns if column.group}) > 1
            names = ((column.group if groups else "", column.name, column.unit) for column in columns)
            heads = [" ".join(filter(None, name)) for name in names]
            aligned = [column.align == "right" for column in columns]
            rows = list(zip(*(column.cells for column in columns), strict=True))
            legend = [f"- {_inline(line)}" for line in block.legend]
            return "\n".join([_write_rows(heads, rows, aligned), *([""] if legend else []), *legend])
        case Places():
            ranks = [(format_ranks(one.ranks), one.host, one.state, one.place) for one in block.classes]
            return _write_rows(("ranks", "host", "state", "where"), ranks)
        case SourceExcerpt():
            return f"{_inline(block.file)}:\n\n{_indent(draw_source(block, len(block.lines)))}"
        case Tree():
            return f"{_inline(block.title)}:\n\n{_indent(draw_tree(block))}"
        case _:
            return ""  # of a chart, the numbers are in a table beside it


def _indent(lines: Iterable[str]) -> str:
    """Write lines as code. Indented code, unlike a fence, cannot be ended by what is in it."""
    return "\n".join(f"    {part}" for line in lines for part in clean(line).splitlines())


def _write_item(text: str, more: Sequence[str]) -> str:
    return "\n".join([f"- {_inline(text)}", *(f"  - {_inline(line)}" for line in more)])


def _write_rows(heads: Sequence[str], rows: Iterable[Sequence[str]], to_right: Sequence[bool] = ()) -> str:
    marks = ["--:" if right else "---" for right in to_right or [False] * len(heads)]
    return _draw_rows(list(map(_inline, heads)), marks, [list(map(_inline, row)) for row in rows])


def _draw_rows(heads: Sequence[str], marks: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, marks, *rows))


def _inline(text: str) -> str:
    """Escape collected data so that it is not read as markup."""
    return re.sub(r"([\\`*_<>\[\]|#~])", r"\\\1", " ".join(clean(text).split()))


def draw_tree(tree: Tree) -> list[str]:
    """Return the lines of a tree in ASCII. It goes a level deeper, and names ranks, only where ranks part."""
    lines: list[str] = []
    todo: list[tuple[TreeNode, int, tuple[int, ...]]] = [(root, 0, ()) for root in reversed(tree.roots)]
    while todo:
        node, depth, above = todo.pop()
        ranks = f"  [{format_ranks(node.ranks)}]" if node.ranks != above else ""
        lines.append(f"{'> ' if node.blamed else '  '}{'  ' * depth}{node.text}{ranks}")
        parts = len(node.children) > 1 or any(child.ranks != node.ranks for child in node.children)
        todo += [(child, depth + parts, node.ranks) for child in reversed(node.children)]
    return lines
