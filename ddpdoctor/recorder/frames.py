"""Distinguishes the user's lines from those of Python, installed packages and the recorder."""

from __future__ import annotations

import gc
import os
import sys
from itertools import accumulate, chain, islice, repeat, starmap
from operator import attrgetter

from .storage import ring_layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any, Dict, Iterator, List, Optional, Tuple

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
MAX_DEPTH = 200
MAX_KEPT = 60
_known: Dict[str, bool] = {}


def _roots() -> Tuple[str, ...]:
    """Return the folders of the standard library, as ``sysconfig`` would. Importing that costs more than this."""
    version = os.path.join(getattr(sys, "platlibdir", "lib"), "python%d.%d" % sys.version_info[:2])
    found = {os.path.join(prefix, version) for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.exec_prefix)}
    if getattr(os, "__file__", None):
        found.add(os.path.dirname(os.__file__))
    found.update([os.path.realpath(path) for path in found])
    return tuple(sorted(path + os.sep for path in found))


STDLIB = _roots()


def is_user_file(file: str) -> bool:
    """Return whether a source file is the user's own. The program that was started always is."""
    known = _known.get(file)
    if known is None:
        if file.startswith(HERE):
            known = False
        elif file.startswith("<"):
            known = file in ("<stdin>", "<string>")
        else:
            known = file.startswith(_main_package()) or not ring_layout.is_library_path(file, STDLIB)
        _known[file] = known
    return known


def is_own_file(file: str) -> bool:
    return file.startswith(HERE)


def _main_package() -> Tuple[str, ...]:
    """Return the folder of the installed package that ``python -m`` runs. It counts as the user's in this job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", None) or ""
    top = sys.modules.get(name.split(".")[0]) if "." in name else None
    file = getattr(top, "__file__", None)
    if not file or name.split(".")[0] in ("torch", "ddpdoctor", "multiprocessing"):
        return ()
    return (os.path.dirname(file) + os.sep,)


def describe(file: str, line: int, function: str) -> Dict[str, Any]:
    return {"f": file, "l": line, "n": function, "u": int(is_user_file(file))}


def of_thread(thread: Optional[int]) -> List[Tuple[CodeType, int]]:
    """Return code and line of a thread's frames, innermost first, at most ``MAX_DEPTH``; empty if it has ended."""
    return [(code, line or 0) for code, line in _read_frames(thread, "f_code", "f_lineno")]


def locals_of(thread: Optional[int], depth: int, code: CodeType) -> Dict[str, Any]:
    """Return the local variables of one frame of a thread; empty if another function runs there by now."""
    found = _read_frames(thread, "f_code", "f_locals", depth, depth + 1)
    return dict(found[0][1]) if found and found[0][0] is code else {}


def values_of(thread: Optional[int], code: CodeType) -> List[Any]:
    """Return the values that the innermost frame of a thread uses by name: its variables and its module's globals."""
    found = _read_frames(thread, "f_code", "f_globals", 0, 1)
    known = found[0][1] if found and found[0][0] is code else {}
    return [*locals_of(thread, 0, code).values(), *(known[name] for name in code.co_names if name in known)]


def _read_frames(thread: Optional[int], first: str, second: str, start: int = 0, stop: int = MAX_DEPTH) -> List[Any]:
    """Return two attributes of each frame of a thread in one step of the interpreter, using only C functions."""
    # Between two steps that thread may get the GIL. If it then leaves a frame whose object we hold, that object can
    # point to memory that has been reused (CPython 3.11: SIGSEGV, or an int in place of a frame).
    take: Any = dict.get
    follow: Any = getattr
    found: List[Any] = []
    innermost = map(take, islice(iter(sys._current_frames, None), 1), repeat(thread))
    stack = accumulate(chain(innermost, repeat("f_back", stop)), follow)
    values = islice(map(attrgetter(first, second), stack), start, stop)
    pauses = sys.version_info[:2] == (3, 11) and gc.isenabled()
    try:
        # Python 3.11 makes frame objects on demand, and may collect garbage in the middle of that. A finalizer that
        # releases the GIL would then split the one step. So an empty iterator switches the collector off within the
        # step: before it the other thread could still run and allocate.
        found.extend(chain(filter(None, starmap(gc.disable, ((),))), values) if pauses else values)
    except AttributeError:  # after the outermost frame comes None, which has no attributes
        return found
    finally:
        if pauses:
            gc.enable()
    return found


def describe_thread(thread: int) -> List[Dict[str, Any]]:
    """Return the frames of a thread as the recorder writes them, outermost first, without the recorder's own."""
    stack = reversed(of_thread(thread))
    return trim([describe(c.co_filename, line, c.co_name) for c, line in stack if not is_own_file(c.co_filename)])


def trim(frames: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Shorten a deep stack in its middle; the innermost frames matter most."""
    return frames if len(frames) <= MAX_KEPT else frames[:10] + frames[-(MAX_KEPT - 10) :]


def describe_user(frame: Optional[FrameType]) -> Optional[Dict[str, Any]]:
    """Return the innermost frame of the user's own code in this thread as the recorder writes it, or None."""
    for step in outward(frame, MAX_DEPTH):
        code = step.f_code
        if is_user_file(code.co_filename):
            return describe(code.co_filename, step.f_lineno or 0, code.co_name)
    return None


def outward(frame: Optional[FrameType], most: int = sys.maxsize) -> Iterator[FrameType]:
    while frame is not None and most > 0:
        yield frame
        frame = frame.f_back
        most -= 1
