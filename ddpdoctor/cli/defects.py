"""Says that ddpdoctor itself has failed, and keeps what is needed to put that right."""

from __future__ import annotations

import sys

from ddpdoctor import __version__
from ddpdoctor.cli.output import print_error

ISSUES_URL = "https://github.com/ddpdoctor/ddpdoctor/issues"
ISSUES_HINT = f"Please report it with that file at {ISSUES_URL}. Your script and your files are unchanged."


def show_defect(error: Exception) -> None:
    """Write to stderr what failed, and where its traceback was saved, or why it could not be saved."""
    print_error(f"a defect of ddpdoctor: {type(error).__name__}. {_save_traceback(error)}", ISSUES_HINT)


def _save_traceback(error: Exception) -> str:
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="ddpdoctor-defect-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"ddpdoctor {__version__}, Python {sys.version}\n{text}")
    except OSError as failure:
        return f"The traceback could not be saved: {failure.strerror}."
    return f"The traceback is in {file.name}"
