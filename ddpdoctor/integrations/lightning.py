"""A callback for Lightning's Trainer: ``Trainer(callbacks=[DdpDoctorCallback()])``."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpdoctor.integrations.watch import TITLE, TrainingWatch
from ddpdoctor.recorder.state import pass_on

if TYPE_CHECKING:
    _Callback: Any = object
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import Callback as _Callback
else:
    from lightning.pytorch.callbacks import Callback as _Callback


class DdpDoctorCallback(TrainingWatch, _Callback):  # type: ignore[misc]
    """Watches each ``fit`` of a Trainer, and gives its loggers the report."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Start before the model is wrapped. Lightning calls this in each rank."""
        if stage == "fit":
            self._begin()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        self._end(_log_of(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        self._end(_log_of(trainer), exception)


def _log_of(trainer: Any) -> Any:
    return partial(_log, trainer.loggers) if trainer.is_global_zero and trainer.loggers else None


def _log(loggers: Any, text: str) -> None:
    """Give the text to each logger, in the form that its kind supports."""
    for logger in loggers:
        try:
            if hasattr(logger, "log_text") and hasattr(logger, "log_table"):  # Weights & Biases: rows of a table
                logger.log_text(key=TITLE, columns=["report"], data=[[text]])
            elif hasattr(logger.experiment, "add_text"):  # TensorBoard
                logger.experiment.add_text(TITLE, f"```\n{text}\n```")
            else:
                logger.log_hyperparams({TITLE: text})
                logger.save()
        except Exception as error:  # noqa: BLE001 - a logger that cannot take it must not end training
            pass_on(error)
