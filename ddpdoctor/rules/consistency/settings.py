"""The optimizer settings that ranks recorded: which differ, and which ranks have which value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .blame import DriftBlame, outvoted, sides_by, sides_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.consistency import Values

_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that choose how a step is computed, not what: they change the last bits at most."""
_DECAY = "weight_decay"
_DECOUPLED = frozenset({"AdamW"})
"""Optimizers whose weight decay does not go through their state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSplit:
    """A setting that has different values on different ranks."""

    name: str
    sides: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def blame(self) -> DriftBlame:
        """Return the ranks whose value is not that of the majority."""
        return outvoted([ranks for _, ranks in self.sides])

    @property
    def words(self) -> str:
        """Return "lr is 0.1 on ranks 0 and 1, 0.01 on rank 2"."""
        return f"{self.name} is {sides_words(self.sides)}"


def splits_of(values: Sequence[Values], *, kernels: bool = False) -> tuple[SettingSplit, ...]:
    """Return the settings that differ between ranks. ``kernels`` includes those that only choose a kernel."""
    told = [each for each in values if each.settings]
    names = dict.fromkeys(name for each in told for name, _ in each.settings)
    found = []
    for name in names:
        if base_name(name) in _KERNELS and not kernels:
            continue
        sides = sides_by(told, lambda each, name=name: dict(each.settings).get(name, "not set"))  # type: ignore[misc]
        if len(sides) > 1:
            found.append(SettingSplit(name=name, sides=tuple(sides)))
    return tuple(found)


def base_name(name: str) -> str:
    """Return the name of a setting without its group: "lr" of "1.lr"."""
    return name.rpartition(".")[2]


def state_follows_parameters(values: Sequence[Values]) -> bool:
    """Return whether the state depends on the parameters, because weight decay is added to the gradient."""
    return any(
        each.optimizer.rpartition(".")[2] not in _DECOUPLED
        and any(base_name(name) == _DECAY and _is_on(text) for name, text in each.settings)
        for each in values
    )


def _is_on(text: str) -> bool:
    try:
        return float(text) != 0
    except ValueError:
        return True
