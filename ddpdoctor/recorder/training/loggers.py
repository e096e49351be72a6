"""Records where a rank logs with TensorBoard, so that ``wrap --log-findings`` can put its findings there."""

from __future__ import annotations

import os
import time
from typing import Any

from .. import hooks
from ..state import guarded, here
from ..wrappers import around

MAX_NOTES = 4
"""Our choice: only the first folder of a rank is used. ``add_hparams`` makes a writer for each call."""
_noted = 0


def patch_tensorboard(module: Any) -> None:
    """Patch torch.utils.tensorboard.writer: note the folder of each writer."""
    owner = getattr(module, "SummaryWriter", None)
    hooks.put(owner, "__init__", lambda original: around(original, after=_made), is_api=True)


@guarded("tensorboard")
def _made(writer: Any) -> None:
    global _noted
    if here.ring is None or not here.is_rank or _noted >= MAX_NOTES:
        return
    _noted += 1
    folder = os.path.abspath(os.fspath(writer.log_dir))
    here.ring.note({"k": "tensorboard", "folder": folder, "at": time.monotonic_ns()})
