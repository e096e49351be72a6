"""The result and the error of ``ddpdoctor.check_consistency``, which users call in their own code."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.model.sides import outvoted

MAX_NAMED = 5
"""How many differences a message names (our choice). The result holds all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor or setting whose values differ between ranks."""

    what: str
    """"parameter", "gradient", "buffer", "optimizer state" or "optimizer setting"."""
    name: str
    """The name in the module, without ``module.``. A setting has its own name: "lr" or "group 1: lr"."""
    part: str
    """For optimizer state, which part: "exp_avg"; else empty."""
    sides: tuple[tuple[int, ...], ...]
    """Sets of global ranks with equal values, the largest set first."""
    values: tuple[str, ...]
    """One per side: the value of a setting, "float32[8, 16]" for a tensor, "none" if it is missing."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the minority, or all ranks if no majority agrees."""
        return outvoted(self.sides)

    def __str__(self) -> str:
        part = f" ({self.part})" if self.part else ""
        shown = len(set(self.values)) > 1
        sides = [
            rank_list(side) + (f": {value}" if shown else "")
            for side, value in zip(self.sides, self.values, strict=True)
        ]
        return f"{self.what} {self.name}{part}: " + (", " if shown else " against ").join(sides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencyResult:
    """Whether the replicas of a group are equal. All its ranks get the same result."""

    equal: bool
    differences: tuple[TensorDifference, ...]
    """Optimizer settings first, because they explain the rest. Then parameters, buffers, gradients, optimizer state."""
    ranks: tuple[int, ...]
    """The global ranks that were compared."""
    compared: int
    """Number of tensors and settings that this rank contributed."""
    left_out: tuple[str, ...]
    """Phrases that say what was not compared on this rank, and why."""

    @property
    def text(self) -> str:
        """Return one sentence with the result and the first differences."""
        who = rank_list(self.ranks)
        if self.equal:
            return f"replicas are equal on {who}: {self.compared} tensors and settings compared"
        named = "; ".join(map(str, self.differences[:MAX_NAMED]))
        more = len(self.differences) - MAX_NAMED
        return f"replicas differ on {who}: {named}" + (f"; and {more} more" if more > 0 else "")

    def __bool__(self) -> bool:
        return self.equal


class ConsistencyError(RuntimeError):
    """Replicas that should be equal are not. The message names the first differences; ``result`` has all."""

    def __init__(self, result: ConsistencyResult) -> None:
        """Keep the result."""
        super().__init__(result.text)
        self.result = result
