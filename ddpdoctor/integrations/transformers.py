"""A callback for the Trainer of Transformers: ``Trainer(..., callbacks=[DdpDoctorTrainerCallback()])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.integrations.watch import TITLE, TrainingWatch

if TYPE_CHECKING:
    _Callback: Any = object
else:
    from transformers import TrainerCallback as _Callback


class DdpDoctorTrainerCallback(TrainingWatch, _Callback):  # type: ignore[misc]
    """Watches each ``train`` of a Trainer. The report goes to the log of Transformers, and to the Trainer's history.

    The Trainer does not report errors to its callbacks. Then the watch ends with the process.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        self._begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002

        def log(text: str) -> None:
            from transformers.utils.logging import get_logger

            get_logger("transformers.ddpdoctor").warning(text)
            state.log_history.append({TITLE: text, "step": state.global_step})

        self._end(log if state.is_world_process_zero else None)
