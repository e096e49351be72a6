"""The command ``ddpdoctor``: the one place that prints errors and ends the process."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ddpdoctor.cli.defects import show_defect
from ddpdoctor.cli.output import show_error
from ddpdoctor.model.errors import UserError

DEFECT = 3
INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and end the process with the exit status of the design's table."""
    try:
        status = _run(sys.argv[1:])
    except UserError as error:
        show_error(error)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001  the outermost wall: no traceback ever reaches the terminal
        show_defect(error)
        sys.exit(DEFECT)
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    """Run a verb. Ranks wait for all that ``wrap`` imports before it starts them, so Typer is kept for the rest."""
    if arguments[:1] == ["wrap"]:
        from ddpdoctor.cli.plain import read_plain

        asked = read_plain(arguments[1:], os.environ)
        if asked is not None:
            from ddpdoctor.cli.wrapping import run_wrap

            return run_wrap(asked)
    from ddpdoctor.cli import verbs

    verbs.app(prog_name="ddpdoctor")
    return 0
