"""The command ``ddpdoctor``. Only this module prints errors and ends the process."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

from ddpdoctor.model.errors import ExitStatus, UserError

# Errors of files and folders that a user names, wherever they are met. They are not defects of ddpdoctor.
OF_PATHS = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ESTALE})
LOOP = "Symlink loop from "


def main() -> NoReturn:
    """Run the command line and end the process with one of the documented exit statuses."""
    # Open /dev/null for each closed standard stream. Otherwise the next file that is opened takes its place.
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == descriptor:
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, "w" if descriptor else "r"))  # noqa: PTH123, SIM115
    try:
        from ddpdoctor.cli.verbs import read_command_line

        run, options = read_command_line(sys.argv[1:])
        status = run(options)
    except UserError as error:
        from ddpdoctor.cli.output import show_error

        show_error(error)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(ExitStatus.INTERRUPTED)
    except Exception as error:  # noqa: BLE001  the outermost wall: no traceback ever reaches the terminal
        if came_of_interrupt(error):
            sys.exit(ExitStatus.INTERRUPTED)
        from ddpdoctor.cli.output import show_defect, show_error

        known = as_user_error(error)
        if known is not None:
            show_error(known)
            sys.exit(known.status)
        show_defect(error)
        sys.exit(ExitStatus.DEFECT)
    sys.exit(status)


def as_user_error(error: Exception) -> UserError | None:
    """Return an error that the user can do something about, or None for a defect."""
    if isinstance(error, OSError) and error.errno in OF_PATHS and error.filename is not None:
        help_text = "Run it as the owner of the files, or give other files."
        return UserError(f"{error.filename} cannot be read: {error.strerror}", help=help_text)
    if isinstance(error, RuntimeError) and str(error).startswith(LOOP):  # Path.resolve() before Python 3.13
        return UserError(f"symbolic links form a loop: {str(error).removeprefix(LOOP)}", help="Give another path.")
    return error if isinstance(error, UserError) else None


def came_of_interrupt(error: BaseException) -> bool:
    """Return whether a Ctrl-C caused an error. Before 3.12, one during the creation of a class raises RuntimeError."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, KeyboardInterrupt):
        link = link.__cause__ or link.__context__
    return link is not None
