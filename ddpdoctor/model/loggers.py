"""Where a script logs its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Logger:
    """One use of TensorBoard, W&B or MLflow."""

    name: str
    """``tensorboard``, ``wandb`` or ``mlflow``."""
    place: Mapping[str, str]
    """What finds the log again. All have ``folder``: that of the event files, of W&B's files, or the one in which the
    script used MLflow. W&B has ``id``, ``project``, ``entity``, ``mode`` and ``base_url``, and MLflow ``id`` and
    ``tracking_uri``."""
