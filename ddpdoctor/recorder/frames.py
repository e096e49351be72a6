"""Tells the user's own lines from those of Python, installed packages and the recorder."""

from __future__ import annotations

import os
import sys

from . import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, Dict, List, Optional, Tuple

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
MAX_DEPTH = 200
MAX_KEPT = 60

_known: Dict[str, bool] = {}


def _roots() -> Tuple[str, ...]:
    """Return the folders of the standard library, as ``sysconfig`` says; its import costs more than this."""
    version = os.path.join(getattr(sys, "platlibdir", "lib"), "python%d.%d" % sys.version_info[:2])
    found = {os.path.join(prefix, version) for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.exec_prefix)}
    if getattr(os, "__file__", None):
        found.add(os.path.dirname(os.__file__))
    found.update([os.path.realpath(path) for path in found])
    return tuple(sorted(path + os.sep for path in found))


STDLIB = _roots()


def is_user_file(file: str) -> bool:
    """Return whether a file of code is the user's own; the program that was started always is."""
    known = _known.get(file)
    if known is None:
        known = _known[file] = _look(file)
    return known


def is_own_file(file: str) -> bool:
    """Return whether a file of code is the recorder's."""
    return file.startswith(HERE)


def _look(file: str) -> bool:
    if file.startswith(HERE):
        return False
    if file.startswith("<"):
        return file in ("<stdin>", "<string>")
    return file.startswith(_main_package()) or not wire.is_library_path(file, STDLIB)


def _main_package() -> Tuple[str, ...]:
    """Return the folder of the installed package that ``python -m`` runs, which is the user's for this job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", None) or ""
    top = sys.modules.get(name.split(".")[0]) if "." in name else None
    file = getattr(top, "__file__", None)
    if not file or name.split(".")[0] in ("torch", "ddpdoctor", "multiprocessing"):
        return ()
    return (os.path.dirname(file) + os.sep,)


def describe(file: str, line: int, function: str) -> Dict[str, Any]:
    """Return a frame as the recorder writes it."""
    return {"f": file, "l": line, "n": function, "u": int(is_user_file(file))}


def walk(frame: Optional[FrameType]) -> List[Dict[str, Any]]:
    """Return the frames of a live stack, outermost first, without the recorder's own."""
    found: List[Dict[str, Any]] = []
    while frame is not None and len(found) < MAX_DEPTH:
        code = frame.f_code
        if not is_own_file(code.co_filename):
            found.append(describe(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    found.reverse()
    return trim(found)


def trim(frames: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Shorten a deep stack in its middle; the innermost frames matter most."""
    if len(frames) <= MAX_KEPT:
        return frames
    return frames[:10] + frames[-(MAX_KEPT - 10) :]


def innermost_user(frame: Optional[FrameType]) -> Optional[FrameType]:
    """Return the innermost frame of the user's own code, or None."""
    depth = 0
    while frame is not None and depth < MAX_DEPTH:
        if is_user_file(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
        depth += 1
    return None
