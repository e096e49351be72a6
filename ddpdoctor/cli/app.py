"""The command ``ddpdoctor``: the one place that prints errors and ends the process."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus


def main() -> NoReturn:
    """Run the command line and end the process with the exit status of the design's table."""
    try:
        status = _run(sys.argv[1:])
    except UserError as error:
        from ddpdoctor.cli.output import show_error

        show_error(error)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(ExitStatus.INTERRUPTED)
    except Exception as error:  # noqa: BLE001  the outermost wall: no traceback ever reaches the terminal
        if came_of_interrupt(error):
            sys.exit(ExitStatus.INTERRUPTED)
        from ddpdoctor.cli.output import show_defect

        show_defect(error)
        sys.exit(ExitStatus.DEFECT)
    sys.exit(status)


def came_of_interrupt(error: BaseException) -> bool:
    """Say whether a Ctrl-C led to an error: one that strikes as a class is made comes as a RuntimeError before 3.12."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, KeyboardInterrupt):
        link = link.__cause__ or link.__context__
    return link is not None


def _run(arguments: list[str]) -> int:
    """Run a verb. A plain command line is read without Typer, since ranks and users wait for its import."""
    from ddpdoctor.cli.listing import VERBS, load_verb

    name, words = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in VERBS:
        from ddpdoctor.cli.plain import read_plain, read_wrap

        verb = load_verb(name)
        options = read_wrap(words, os.environ) if name == "wrap" else read_plain(verb.Options, words, os.environ)
        if options is not None:
            status: int = verb.run(options)
            return status
    from ddpdoctor.cli import verbs

    verbs.app(prog_name="ddpdoctor")  # ends the process
    return ExitStatus.OK
