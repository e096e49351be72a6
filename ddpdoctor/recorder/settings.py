"""The settings that ``wrap`` passes to each rank's recorder: one environment variable per setting, named after it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Mapping

PREFIX = "DDPDOCTOR_"


class RecorderSettings:
    """The settings, with their defaults."""

    __slots__ = ("check_auto", "check_every", "log_findings", "speed", "tune_only", "tune_rounds", "tune_setting")

    def __init__(
        self,
        check_every: int = 0,
        speed: bool = False,
        log_findings: bool = False,
        tune_rounds: int = 0,
        tune_only: str = "",
        tune_setting: str = "",
        check_auto: bool = False,
    ) -> None:
        # Steps between two fingerprints of a rank's replica. 0 turns off the checks of replicas, gradients and data.
        self.check_every = check_every
        # The recorder chooses the number of steps. Where it cannot measure, ``check_every`` holds.
        self.check_auto = check_auto
        # Steps are to be slowed down as little as possible: gradients are checked only where replicas are compared.
        self.speed = speed
        # Whether to note where the script logs (TensorBoard, W&B, MLflow), for the findings at the end.
        self.log_findings = log_findings
        self.tune_rounds = tune_rounds  # In how many rounds a trial tries settings of DDP. 0: the job is no trial.
        # Names of the settings that it tries, with commas between them. Empty: all that fit the model.
        self.tune_only = tune_only
        # The one setting that this launch has from its start. Empty: the trial switches in the running job.
        self.tune_setting = tune_setting

    def variables(self) -> Dict[str, str]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {PREFIX + name.upper(): str(int(v) if isinstance(v, bool) else v) for name, v in values.items()}


def read_settings(env: Mapping[str, str]) -> RecorderSettings:
    """Return the settings of this rank. A setting keeps its default if its variable does not fit the type."""
    settings = RecorderSettings()
    for name in settings.__slots__:
        text = env.get(PREFIX + name.upper(), "")
        kind = type(getattr(settings, name))
        if kind is str:
            setattr(settings, name, text)
        elif text.isdigit():
            setattr(settings, name, kind(int(text)))
    return settings
