"""A callback for the Trainer of Transformers: ``Trainer(..., callbacks=[DdpDoctorTrainerCallback()])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.integrations.watch import TITLE, TrainingWatch

if TYPE_CHECKING:
    import os

    from ddpdoctor.integrations.watch import HangAction

    _Callback: Any = object
else:
    from transformers import TrainerCallback as _Callback


class DdpDoctorTrainerCallback(_Callback):  # type: ignore[misc]
    """Watches each ``train`` of a Trainer. The report goes to the log of Transformers, and to the Trainer's history.

    The Trainer tells its callbacks nothing of an error. Then the watch ends with the process.
    """

    def __init__(
        self,
        *,
        hang_timeout: float = 300.0,
        on_hang: HangAction = "report",
        report_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Take what ``ddpdoctor.watch`` takes."""
        self._training = TrainingWatch(type(self).__name__, hang_timeout, on_hang, report_dir)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Start."""
        self._training.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Stop, and log what was found."""

        def log(text: str) -> None:
            from transformers.utils.logging import get_logger

            get_logger("transformers.ddpdoctor").warning(text)
            state.log_history.append({TITLE: text, "step": state.global_step})

        self._training.end(log if state.is_world_process_zero else None)
