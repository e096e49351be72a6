"""Names the lock file that a Python loop polls for. The kernel does not see such a wait, but the stack shows it."""

from __future__ import annotations

import os

from .. import frames
from ..state import here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, Dict, Iterator, Optional

LOOPS = {
    "/torch/utils/file_baton.py": "lock_file_path",
    "/filelock/_api.py": "lock_file",
    "/fasteners/process_lock.py": "path",
    "/portalocker/utils.py": "filename",
}
"""By the end of the source file's path: the attribute of ``self`` with the lock's path. A baton is taken by creating
its file, and stays taken if that process dies. The others request a kernel lock again and again."""
MARKERS = ("FileBaton", "SoftFileLock")
"""Classes for which the existence of the file is the lock."""
LOOKS = frozenset({"exists", "lexists", "isfile", "is_file", "open", "stat", "access", "listdir", "glob"})
DEEPEST = 40
MOST_PATH = 4096


def lock() -> Optional[Dict[str, Any]]:
    """Return the lock file that the main thread polls for, or None if it is in no such loop."""
    for depth, (code, _) in enumerate(frames.of_thread(here.main_thread)[:DEEPEST]):
        attribute = _attribute(code.co_filename)
        if attribute is not None:
            owner = frames.locals_of(here.main_thread, depth, code).get("self")
            path: Any = getattr(owner, attribute, None)
            if path:
                marker = any(kind.__name__ in MARKERS for kind in type(owner).__mro__)
                return {"path": os.path.abspath(os.fspath(path)), "kind": "marker" if marker else "kernel"}
        elif depth == 0 and frames.is_user_file(code.co_filename):
            return _of_own_loop(code)
    return None


def _of_own_loop(code: CodeType) -> Optional[Dict[str, Any]]:
    """Return the lock file that one of the user's functions waits for by sleeping and checking files."""
    if "sleep" not in code.co_names or not LOOKS.intersection(code.co_names):
        return None
    for path in _texts(code):
        if _sounds_like_lock(os.path.basename(path).lower()) and os.path.isfile(path):
            return {"path": os.path.abspath(path), "kind": "own-loop"}
    return None


def _sounds_like_lock(name: str) -> bool:
    """Return whether a file's name contains the word lock, but not as a part of block or clock."""
    at = name.find("lock")
    return name.endswith(".lck") or (at >= 0 and not name[at - 1 : at].isalpha())


def _texts(code: CodeType) -> Iterator[str]:
    """Return the paths that a function may check: its variables, its constants, and the globals that it names."""
    found = frames.values_of(here.main_thread, code)
    for value in (*found, *code.co_consts):
        if isinstance(value, str) or type(value).__module__.startswith("pathlib"):
            text = str(value)
            if len(text) < MOST_PATH:
                yield text


def _attribute(file: str) -> Optional[str]:
    return next((name for end, name in LOOPS.items() if file.endswith(end)), None)
