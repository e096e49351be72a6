"""ddpdoctor's only error class, which only ``cli/app`` prints, other errors as a line, and all exit statuses."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """An exit status of ddpdoctor. ``wrap`` otherwise returns the status of the launcher."""

    OK = 0
    FOUND = 1
    WRONG_USE = 2
    DEFECT = 3
    INCONCLUSIVE = 4
    GIVE_UP = 70  # ``EX_SOFTWARE`` of sysexits.h
    RETRY = 75  # ``EX_TEMPFAIL`` of sysexits.h
    HUNG = 124
    INTERRUPTED = 130


# The table of docs/exit-status.md.
MEANINGS = {
    ExitStatus.OK: "nothing found",
    ExitStatus.FOUND: "findings",
    ExitStatus.WRONG_USE: "wrong use or configuration",
    ExitStatus.DEFECT: "a defect of ddpdoctor",
    ExitStatus.INCONCLUSIVE: "inconclusive: a check that was needed could not run",
    ExitStatus.GIVE_UP: "with `--exit-status-of-verdict`: the script or its settings are at fault, do not restart",
    ExitStatus.RETRY: "with `--exit-status-of-verdict`: a machine or the network is at fault, restart elsewhere",
    ExitStatus.HUNG: "`wrap` stopped a hung job, as timeout(1) does",
    ExitStatus.INTERRUPTED: "interrupted",
}


class UserError(Exception):
    """A problem that the user can fix: what is wrong, what to do about it, and the exit status."""

    def __init__(self, message: str, *, help: str = "", status: int = ExitStatus.WRONG_USE) -> None:  # noqa: A002
        super().__init__(message)
        self.message = message
        self.help = help
        self.status = status


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has no text."""
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__


def typed_line(error: BaseException) -> str:
    """Return the type and the first line of an error: "ValueError: no such label". It has at most 500 characters."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"[:500]


def install_command(extra: str) -> str:
    """Return what installs an extra: from the clone or the file that ddpdoctor came from (PEP 610), else from PyPI."""
    import json
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        url = urlsplit(json.loads(distribution("ddpdoctor").read_text("direct_url.json") or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError):
        url = urlsplit("")
    source = unquote(url.path) if url.scheme == "file" else "ddpdoctor"
    return f"pip install {shlex.quote(f'{source}[{extra}]')}"
