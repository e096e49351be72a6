"""Finds the store that a rank is connecting to, and the line that set its address. torch retries without a message."""

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

FILE = "/torch/distributed/rendezvous.py"
MAKES_STORE = "_create_c10d_store"
METHODS = {"_env_rendezvous_handler": "env://", "_tcp_rendezvous_handler": "tcp://"}
DEEPEST = 40
MOST_CODES = 2000
"""How many of the user's functions are searched for the line that set an address."""


def sought() -> Optional[Dict[str, Any]]:
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
