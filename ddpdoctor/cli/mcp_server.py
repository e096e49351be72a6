"""The server of ``ddpdoctor mcp``. Each tool returns a text and data, and none changes anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from ddpdoctor import __version__
from ddpdoctor.model.words import format_span

INSTRUCTIONS = """Diagnoses distributed PyTorch training from what a job left behind. Use `report` for a run folder of
`ddpdoctor wrap`, `analyze` for logs, dumps and stacks, `explain` for a code such as DD601 or an error message. Act on
`verdict` first; `findings` has all, worst first. No tool starts, stops or changes a job."""
WITH_DATA = "Also return the measurements (`data`), which can be long. Without it, `data` is empty."
RunFolder = Annotated[
    str | None, Field(description="A run folder or its report.json. Without it, the latest in ddpdoctor-report/.")
]
WithData = Annotated[bool, Field(description=WITH_DATA)]
Names = Annotated[list[str], Field(description="Codes or kinds of checks: shm, DD121, or DD1 for all DD1xx.")]
# Sets the path first: the working folder may be a project from elsewhere, with a json.py in it.
CHILD = "import sys; sys.path[:] = sys.argv[1:]; from ddpdoctor.cli.mcp import main; main()"


def make_server(limit_s: float) -> MCPServer[Any]:
    """Return the server with its tools. Each call has ``limit_s``."""

    def report(run_dir: RunFolder = None, with_data: WithData = False) -> CallToolResult:
        """Return the report of a job that ran under `ddpdoctor wrap`, or of another saved check: verdict, findings."""
        return _run_tool(limit_s, "report", run_dir=run_dir, with_data=with_data)

    def analyze(
        paths: Annotated[list[str], Field(description="Files or folders that the job left.", min_length=1)],
        with_data: WithData = False,
    ) -> CallToolResult:
        """Find out why a job failed or hung from its logs, flight recorder dumps and stacks. Nothing is executed."""
        return _run_tool(limit_s, "analyze", paths=paths, with_data=with_data)

    def explain(
        name: Annotated[str, Field(description="A code or kind (DD601, stuck), or the text of an error.")],
    ) -> CallToolResult:
        """Explain a code of a finding, or an error that torch, NCCL or Python raised: what it means, what to do."""
        return _run_tool(limit_s, "explain", name=name)

    def check_env(
        checks: Names = [],  # noqa: B006 - the SDK copies it
        skip: Names = [],  # noqa: B006
        with_data: WithData = False,
    ) -> CallToolResult:
        """Check this machine alone: versions, variables, limits, network and GPUs. It takes some seconds."""
        return _run_tool(limit_s, "check_env", checks=checks, skip=skip, with_data=with_data)

    def status(run_dir: RunFolder = None) -> CallToolResult:
        """Return what a job under `ddpdoctor wrap` does right now. The job is not slowed down."""
        return _run_tool(limit_s, "status", run_dir=run_dir)

    server: MCPServer[Any] = MCPServer("ddpdoctor", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for tool in (report, analyze, explain, check_env, status):
        server.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))(tool)
    return server


def _run_tool(limit_s: float, tool: str, **arguments: Any) -> CallToolResult:
    """Run a tool in its own process: it may read for a long time, and the SDK uses stdout for the protocol."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *sys.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True,
    )  # fmt: skip
    try:
        question = json.dumps({"tool": tool, "arguments": arguments, "limit_s": limit_s})
        written, _ = process.communicate(question, timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it is not waited for: one that the kernel holds ends later
        raise ToolError(
            f"{tool} had no answer within {format_span(limit_s)} and was stopped\nGive fewer or smaller files, or "
            "start the server with `ddpdoctor mcp --timeout 10m`."
        ) from None
    try:
        answer = json.loads(written)
    except ValueError:
        raise ToolError(f"{tool} ended with status {process.returncode} and without an answer") from None
    if "error" in answer:
        raise ToolError(answer["error"])
    # Data comes twice, because older clients read only texts.
    contents = [TextContent(text=answer["text"]), TextContent(text=json.dumps(answer["body"], allow_nan=False))]
    return CallToolResult(content=[*contents], structured_content=answer["body"])
