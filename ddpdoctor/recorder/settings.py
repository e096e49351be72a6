"""What ``wrap`` tells the recorder of each rank: one variable of the environment a setting, named after it.

CONTRIBUTING says how to add one.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Mapping

PREFIX = "DDPDOCTOR_"


class Settings:
    """The settings, with the values that hold where no variable says otherwise."""

    __slots__ = ("check_every",)

    def __init__(self, check_every: int = 0) -> None:
        self.check_every = check_every
        """Every how many steps a rank writes down what its replica is like; 0: neither that nor what gradients and data
        are like."""

    def variables(self) -> Dict[str, str]:
        """Return them as they travel to the ranks."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {PREFIX + name.upper(): str(int(v) if isinstance(v, bool) else v) for name, v in values.items()}


def read_settings(env: Mapping[str, str]) -> Settings:
    """Return the settings of this rank. A variable that is no value of its setting's type leaves the default."""
    settings = Settings()
    for name in settings.__slots__:
        text = env.get(PREFIX + name.upper(), "")
        kind = type(getattr(settings, name))
        if kind is str:
            setattr(settings, name, text)
        elif text.isdigit():
            setattr(settings, name, kind(int(text)))
    return settings
