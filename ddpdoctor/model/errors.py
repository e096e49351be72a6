"""ddpdoctor's only error class, which only ``cli/app`` prints, and what other errors say in a line."""

from __future__ import annotations

from ddpdoctor.model.exit_status import ExitStatus


class UserError(Exception):
    """A problem that the user can fix: what is wrong, what to do about it, and the exit status."""

    def __init__(self, message: str, *, help: str = "", status: int = ExitStatus.WRONG_USE) -> None:  # noqa: A002
        """Keep ``message`` (what is wrong), ``help`` (what to do, may be empty) and the exit ``status``."""
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
