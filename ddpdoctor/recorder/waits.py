"""Names the lock file that a loop of Python's polls for: the kernel knows nothing of such a wait, the stack does."""

from __future__ import annotations

import os

from . import frames
from .state import here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

LOOPS = {
    "/torch/utils/file_baton.py": "lock_file_path",
    "/filelock/_api.py": "lock_file",
}
"""By the end of the file: the attribute of ``self`` that has the path. A baton is made by creating its file, and stays
taken where the process that made it died; filelock asks for an flock twenty times a second."""
DEEPEST = 40


def lock_path() -> Optional[str]:
    """Return the path of the lock that the main thread polls for, or None where it is in no such loop."""
    for depth, (code, _) in enumerate(frames.of_thread(here.main_thread)[:DEEPEST]):
        attribute = _attribute(code.co_filename)
        if attribute is not None:
            owner = frames.locals_of(here.main_thread, depth, code).get("self")
            path: Any = getattr(owner, attribute, None)
            if path:
                return str(os.path.abspath(os.fspath(path)))
    return None


def _attribute(file: str) -> Optional[str]:
    path = file.replace("\\", "/")
    return next((name for end, name in LOOPS.items() if path.endswith(end)), None)
