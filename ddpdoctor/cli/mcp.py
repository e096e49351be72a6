"""``ddpdoctor mcp``: serves read-only tools to a coding agent over the Model Context Protocol."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ddpdoctor.cli.app import as_user_error
from ddpdoctor.cli.options import TIMEOUT, typed
from ddpdoctor.cli.output import ISSUES_HINT, describe_defect, say
from ddpdoctor.model.errors import ExitStatus, UserError, install_command
from ddpdoctor.report.lines import clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.findings import Report

    Answer = dict[str, Any]

PACKAGES = frozenset({"mcp", "mcp_types", "pydantic"})


def main() -> None:
    """Answer one question. Errors contain the fix instead of a traceback."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_REAL, asked["limit_s"] + 5)  # ends this process if the server is gone by then
    with answers:
        json.dump(answer(asked["tool"], asked["arguments"]), answers, allow_nan=False)


def answer(tool: str, arguments: dict[str, Any]) -> Answer:
    """Return ``text`` and ``body`` of a tool's answer, or ``error``."""
    try:
        return TOOLS[tool](**arguments)
    except Exception as error:  # noqa: BLE001 - the outermost wall of this process
        known = as_user_error(error)
        if known is None:
            return {"error": f"{describe_defect(error)}\n{ISSUES_HINT}"}
        return {"error": "\n".join(filter(None, (clean(known.message), clean(known.help))))}


def report(run_dir: str | None, *, with_data: bool) -> Answer:
    from ddpdoctor.cli.report import RUNS, find_latest, read_run

    return _of_report(read_run(Path(run_dir) if run_dir else find_latest(Path(RUNS))), with_data=with_data)


def analyze(paths: list[str], *, with_data: bool) -> Answer:
    from ddpdoctor.cli.analyze import read_paths

    if "-" in paths:
        raise UserError("stdin belongs to the protocol", help="Save the text to a file and give its path.")
    return _of_report(read_paths(tuple(paths), ("ddpdoctor", "analyze", *paths)), with_data=with_data)


def explain(name: str) -> Answer:
    from ddpdoctor.cli.explain import render_error, render_page
    from ddpdoctor.diagnose.files import find_error, read_page

    known = find_error(name)
    if known is not None:
        title, texts = known
        body = {label.replace(" ", "_"): text for label, text in texts.items()}
        return {"text": render_error(title, texts, None), "body": {"error": title, **body}}
    page = read_page(name)
    return {"text": render_page(page), "body": asdict(page)}


def check_env(checks: list[str], skip: list[str], *, with_data: bool) -> Answer:
    from ddpdoctor.diagnose.machines import CheckEnvOptions, check_environment

    command = ("ddpdoctor", "check-env", *checks, *(word for check in skip for word in ("--skip", check)))
    wanted = CheckEnvOptions(checks=tuple(checks), skip=tuple(skip), alone=True, command=command)
    report = check_environment(wanted, os.environ)
    assert report is not None  # a process that is alone reports
    return _of_report(report, with_data=with_data)


def status(run_dir: str | None) -> Answer:
    """Run the command `status`, and return what it prints as text and as JSON."""
    from ddpdoctor.cli import status as verb

    printed = []
    forms: tuple[verb.StatusFormat, ...] = ("text", "json")
    for form in forms:
        # Not with the defaults of configuration files: none of them may make it act.
        options = verb.Options(run=Path(run_dir) if run_dir else None, every=1.0, format=form)
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            verb.run(options)
        printed.append(stream.getvalue())
    return {"text": printed[0], "body": json.loads(printed[1])}


TOOLS: dict[str, Callable[..., Answer]] = {
    "report": report, "analyze": analyze, "explain": explain, "check_env": check_env, "status": status,
}  # fmt: skip


def _of_report(report: Report, *, with_data: bool) -> Answer:
    from ddpdoctor.report.formats import report_to_dict
    from ddpdoctor.report.text import render_verdict

    body = report_to_dict(report)
    return {"text": render_verdict(report), "body": body if with_data else {**body, "data": {}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Serve reports to a coding agent over the Model Context Protocol.

    The server uses stdin and stdout. It only reads: none of its tools starts, stops or changes a job.
    """

    timeout_s: Annotated[float, TIMEOUT.but(panel="Options", help="How long a call of a tool may take.")] = typed("120")


def run(options: Options) -> int:
    try:
        from ddpdoctor.cli.mcp_server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES:
            raise
        what = "this needs version 2 of the mcp package, which is not installed here"
        raise UserError(what, help=f"Install it with `{install_command('mcp')}`.") from error
    if sys.stdin.isatty():
        say(sys.stderr, "waiting for a Model Context Protocol client on stdin; Ctrl-C stops it")
    make_server(options.timeout_s).run("stdio")
    return ExitStatus.OK
