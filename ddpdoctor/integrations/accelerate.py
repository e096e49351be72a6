"""A tracker for Accelerate: ``Accelerator(log_with=[DdpDoctorTracker()])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.integrations.watch import TITLE, TrainingWatch

if TYPE_CHECKING:
    _Tracker: Any = object
else:
    from accelerate.tracking import GeneralTracker as _Tracker


class DdpDoctorTracker(TrainingWatch, _Tracker):  # type: ignore[misc]
    """Watches from when it is made to ``end_training``. The report goes to the log of Accelerate.

    Accelerate starts and ends trackers on the main process only. The other ranks leave the watch when they end.
    """

    name = TITLE
    requires_logging_directory = False
    main_process_only = False
    begins_at_once = True

    @property
    def tracker(self) -> TrainingWatch:
        """The object that Accelerate returns as the tracker itself."""
        return self

    def log(self, values: dict[str, Any], step: int | None, **more: Any) -> None:
        """Keep nothing: what a script logs is for its other trackers."""

    def finish(self) -> None:
        from accelerate.logging import get_logger
        from accelerate.state import PartialState

        is_main = PartialState().is_main_process
        self._end(get_logger("accelerate.ddpdoctor").warning if is_main else None)
