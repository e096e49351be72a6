"""Frames of stacks that another machine wrote. Only the path tells whose code it is: the file may not exist here."""

from __future__ import annotations

import re
import sys
from functools import lru_cache

from ddpdoctor.model.stacks import Frame
from ddpdoctor.recorder.storage.ring_layout import is_library_path

_LIBRARY = re.compile(
    r"[/\\]lib(?:64)?[/\\]python\d\.\d+t?[/\\]|[/\\]Python\d+[/\\]Lib[/\\]"
    r"|(?:^|[/\\])torch[/\\](?:distributed|nn|autograd|utils|optim|cuda|multiprocessing|amp|fx|_\w+)[/\\.]"
    r"|[/\\]bin[/\\](?:torchrun|accelerate|deepspeed|lightning|fabric|ray|horovodrun|pytest|ddpdoctor)$"
    r"|(?:^|[/\\])ddpdoctor[/\\](?:recorder|cli|launch)[/\\]"
)
"""The standard library, a torch that is run from its sources, launchers, and ddpdoctor."""
_PACKAGES = frozenset((
    "accelerate", "datasets", "deepspeed", "lightning", "megatron", "numpy", "pytorch_lightning", "ray", "torch",
    "torchdata", "torchvision", "transformers",
))  # fmt: skip
"""Packages whose paths samplers print from their own folder on: "torch/autograd/graph.py"."""
_PROGRAMS = ("<stdin>", "<string>")


def foreign_frame(file: str, line: int, function: str) -> Frame:
    """Return a frame of a stack that may come from another machine."""
    return Frame(file=file, line=line, function=function, user=is_foreign_user_file(file))


@lru_cache(maxsize=4096)
def is_foreign_user_file(file: str) -> bool:
    """Return whether a path is that of a user's own file, not of Python, an installed package or ddpdoctor."""
    if file.startswith("<"):
        return file in _PROGRAMS
    if is_library_path(file, ()) or _LIBRARY.search(file):
        return False
    first = re.split(r"[/\\]", file, maxsplit=1)[0].removesuffix(".py")
    is_relative = not file.startswith(("/", ".", "~")) and ":" not in first
    return not (is_relative and (first in sys.stdlib_module_names or first in _PACKAGES))
