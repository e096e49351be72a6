"""ddpdoctor's only error class. Only ``cli/app`` prints it and ends the process."""

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
