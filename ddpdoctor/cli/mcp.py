"""``ddpdoctor mcp``: serves what only reads to a coding agent, by the Model Context Protocol."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from ddpdoctor.cli.options import TIMEOUT, typed
from ddpdoctor.model.exit_status import ExitStatus

PACKAGES = frozenset({"mcp", "mcp_types", "pydantic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Serve reports to a coding agent by the Model Context Protocol.

    The server speaks on stdin and stdout. It only reads: no tool of it starts, stops or changes a job.
    """

    timeout_s: Annotated[float, TIMEOUT.but(panel="Options", help="How long one call of a tool may take.")] = typed(
        "120"
    )


def run(options: Options) -> int:
    """Serve until stdin ends. Raises ``UserError`` if the SDK is not installed."""
    from ddpdoctor.cli.output import say
    from ddpdoctor.model.errors import UserError

    try:
        from ddpdoctor.cli.mcp_server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES:
            raise
        raise UserError(
            "this needs the package mcp in version 2, which is not installed here",
            help="Install it with `pip install 'ddpdoctor[mcp]'`.",
        ) from error
    if sys.stdin.isatty():
        say(sys.stderr, "waits for a client of the Model Context Protocol on stdin; Ctrl-C ends it")
    make_server(options.timeout_s).run("stdio")
    return ExitStatus.OK
