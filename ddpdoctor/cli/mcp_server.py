"""The tools of ``ddpdoctor mcp``. Each answers with a text and with data, and none changes anything.

The SDK gives stdout to the protocol alone: while it serves, whatever else is printed there goes to stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from ddpdoctor import __version__
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.findings import Report

INSTRUCTIONS = """Diagnoses distributed PyTorch training from what a job left behind. Use `report` for a run folder of
`ddpdoctor wrap`, `analyze` for logs, dumps and stacks, `explain` for a code such as DD601 or an error message. Act on
`verdict` first; `findings` has all, worst first. No tool starts, stops or changes a job."""
WITH_DATA = "Also return what was measured (`data`), which can be long. Without it, `data` is empty."
RunFolder = Annotated[
    str | None, Field(description="A run folder or its report.json. Without it, the latest in ddpdoctor-report/.")
]
WithData = Annotated[bool, Field(description=WITH_DATA)]
Names = Annotated[list[str], Field(description="Codes or kinds of checks: shm, DD121, or DD1 for all DD1xx.")]

_one_at_a_time = threading.Lock()
"""The SDK calls tools from several threads. Rules are loaded on demand, and stdout is one."""


def make_server() -> MCPServer[Any]:
    """Return the server with its tools."""
    server: MCPServer[Any] = MCPServer(
        "ddpdoctor", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING"
    )  # fmt: skip
    for tool in (report, analyze, explain, check_env, status):
        server.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))(tool)
    return server


def report(run_dir: RunFolder = None, with_data: WithData = False) -> CallToolResult:
    """Return the report of a job that ran under `ddpdoctor wrap`, or of another saved check: verdict and findings."""
    return _answer(lambda: _report_result(_saved(run_dir), with_data=with_data))


def analyze(
    paths: Annotated[list[str], Field(description="Files or folders that the job left.", min_length=1)],
    with_data: WithData = False,
) -> CallToolResult:
    """Find out why a job failed or hung from its logs, flight recorder dumps and stacks. Nothing is executed."""
    return _answer(lambda: _report_result(_analyzed(paths), with_data=with_data))


def explain(
    name: Annotated[str, Field(description="A code or kind (DD601, stuck), or the text of an error.")],
) -> CallToolResult:
    """Explain a code of a finding, or an error that torch, NCCL or Python raised: what it means, what to do."""
    return _answer(lambda: _explained(name))


def check_env(
    checks: Names = [],  # noqa: B006 - the SDK copies it
    skip: Names = [],  # noqa: B006
    with_data: WithData = False,
) -> CallToolResult:
    """Check this machine alone: versions, variables, limits, network and GPUs. It takes some seconds."""
    return _answer(lambda: _report_result(_checked(checks, skip), with_data=with_data))


def status(run_dir: RunFolder = None) -> CallToolResult:
    """Return what a job under `ddpdoctor wrap` does right now. The job is not asked, and pays nothing."""
    return _answer(lambda: _status_result(run_dir))


def _answer(make: Callable[[], CallToolResult]) -> CallToolResult:
    """Return a result. Errors become errors of the tool, with what to do and without a traceback."""
    from ddpdoctor.cli.output import ISSUES_HINT, describe_defect
    from ddpdoctor.report.lines import clean

    with _one_at_a_time:
        try:
            return make()
        except UserError as error:
            raise ToolError("\n".join(filter(None, (clean(error.message), clean(error.help))))) from error
        except Exception as error:
            raise ToolError(f"{describe_defect(error)}\n{ISSUES_HINT}") from error


def _report_result(report: Report, *, with_data: bool) -> CallToolResult:
    from ddpdoctor.report.formats.json_format import report_to_dict
    from ddpdoctor.report.text.report import render_verdict

    body = report_to_dict(report)
    return _result(render_verdict(report), body if with_data else {**body, "data": {}})


def _result(text: str, body: dict[str, Any]) -> CallToolResult:
    """Return a text, and data twice, because older clients read only texts."""
    written = json.dumps(body, allow_nan=False)
    contents = [TextContent(text=text), TextContent(text=written)]
    return CallToolResult(content=[*contents], structured_content=json.loads(written))


def _saved(run_dir: str | None) -> Report:
    from ddpdoctor.cli.report import RUNS, find_latest, read_run

    return read_run(Path(run_dir) if run_dir else find_latest(Path(RUNS)))


def _analyzed(paths: list[str]) -> Report:
    from ddpdoctor.cli.analyze import read_paths

    if "-" in paths:
        raise UserError("stdin belongs to the protocol", help="Save the text to a file and give its path.")
    pipe = next((path for path in paths if Path(path).is_fifo()), None)
    if pipe is not None:
        raise UserError(f"{pipe} is a pipe, which may never end", help="Save the text to a file and give its path.")
    return read_paths(tuple(paths), ("ddpdoctor", "analyze", *paths))


def _checked(checks: list[str], skip: list[str]) -> Report:
    from ddpdoctor.diagnose.check_env import CheckEnvOptions, check_environment

    command = ("ddpdoctor", "check-env", *checks, *(word for one in skip for word in ("--skip", one)))
    wanted = CheckEnvOptions(checks=tuple(checks), skip=tuple(skip), alone=True, command=command)
    report = check_environment(wanted, os.environ)
    assert report is not None  # a process that is alone reports
    return report


def _explained(name: str) -> CallToolResult:
    from ddpdoctor.cli.explain import render_error, render_page
    from ddpdoctor.diagnose.pages import find_error, read_page

    known = find_error(name)
    if known is not None:
        title, texts = known
        return _result(render_error(title, texts, None), {"error": title, **_keyed(texts)})
    page = read_page(name)
    return _result(render_page(page), asdict(page))


def _keyed(texts: dict[str, str]) -> dict[str, str]:
    return {label.replace(" ", "_"): text for label, text in texts.items()}


def _status_result(run_dir: str | None) -> CallToolResult:
    """Run the command `status`, and return what it prints as text and as JSON."""
    folder = Path(run_dir) if run_dir else None
    text, written = (_printed_status(folder, form) for form in ("text", "json"))
    return _result(text, json.loads(written))


def _printed_status(folder: Path | None, form: str) -> str:
    from ddpdoctor.cli.options import declared_by
    from ddpdoctor.cli.plain import read_plain
    from ddpdoctor.cli.status import Options, run

    # Not with the defaults of configuration files: none of them may make it act.
    options = read_plain(Options, ["--format", form], {}, declared_by(Options))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(replace(options, run=folder))
    return printed.getvalue()
