"""Says what a waiting rank's stack shows and the kernel does not.

That is the lock file that a Python loop polls for, and the store that a rank is connecting to, with the line that set
its address. torch retries without a message.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right

from .. import frames
from ..state import MASTER_VARIABLE, here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

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
MOST_PATH = 4096
FILE = "/torch/distributed/rendezvous.py"
MAKES_STORE = "_create_c10d_store"
METHODS = {"_env_rendezvous_handler": "env://", "_tcp_rendezvous_handler": "tcp://"}
DEEPEST = 40
MOST_CODES = 2000
"""How many of the user's functions are searched for the line that set an address."""


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


def store() -> Optional[Dict[str, Any]]:
    """Return the store that the main thread waits for inside ``init_process_group``, or None if it waits for none."""
    stack = frames.of_thread(here.main_thread)[:DEEPEST]
    for depth, (code, _) in enumerate(stack):
        if code.co_name == MAKES_STORE and code.co_filename.endswith(FILE):
            given = frames.locals_of(here.main_thread, depth, code)
            if "port" in given:
                return _described(given, stack)
    return None


def _described(given: Dict[str, Any], stack: List[Tuple[CodeType, int]]) -> Dict[str, Any]:
    method = next((METHODS[code.co_name] for code, _ in stack if code.co_name in METHODS), "")
    return {
        "host": str(given.get("hostname")),
        "port": int(given["port"]),
        "rank": int(given.get("rank", -1)),
        "method": method,
        "agent": int(os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"),
        "given": os.environ.get(MASTER_VARIABLE),
        "set": _setting_line([code for code, _ in stack]) if method == "env://" else None,
    }


def _setting_line(stack: List[CodeType]) -> Optional[Dict[str, Any]]:
    """Return the user's line that replaced the launcher's address, or None if none did or it is not found."""
    names = _replaced()
    if not names:
        return None
    for count, code in enumerate(_codes(stack)):
        line = _assigns(code, names)
        if line:
            return frames.describe(code.co_filename, line, code.co_name)
        if count > MOST_CODES:
            break
    return None


def _replaced() -> List[str]:
    """Return the names of the address variables that differ from what the launcher gave this process."""
    host, _, port = os.environ.get(MASTER_VARIABLE, "").rpartition(":")
    given = {"MASTER_PORT": port, "MASTER_ADDR": host}
    return [name for name, value in given.items() if value and os.environ.get(name) != value]


def _codes(stack: List[CodeType]) -> Iterator[CodeType]:
    """Return the user's functions: those on the stack with their nested ones, then those of the user's modules."""
    for code in stack:
        if frames.is_user_file(code.co_filename):
            yield from _nested(code)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and frames.is_user_file(file):
            for value in list(vars(module).values()):
                yield from _nested(getattr(value, "__code__", None))


def _nested(code: Any) -> Iterable[CodeType]:
    if not hasattr(code, "co_consts"):
        return
    yield code
    for constant in code.co_consts:
        yield from _nested(constant)


def _assigns(code: CodeType, names: List[str]) -> int:
    """Return the line of ``os.environ[NAME] = ...``, or of an ``update`` with that name; 0 if there is none."""
    if not any(_holds(constant, names) for constant in code.co_consts):
        return 0
    import dis  # torch has loaded it

    steps = list(dis.get_instructions(code))
    starts = [start for start in dis.findlinestarts(code) if start[1]]
    for step, following in zip(steps, steps[1:]):  # noqa: RUF007 - Python 3.8 has no pairwise
        value = code.co_consts[step.arg or 0] if step.opname == "KW_NAMES" else step.argval  # 3.11: dis gives no argval
        if _holds(value, names) and (following.opname == "STORE_SUBSCR" or "update" in code.co_names):
            at = bisect_right(starts, (step.offset, sys.maxsize)) - 1
            return starts[at][1] or 0 if at >= 0 else 0
    return 0


def _holds(value: Any, names: List[str]) -> bool:
    return value in names if isinstance(value, str) else isinstance(value, tuple) and any(n in value for n in names)
