"""What ``ddpdoctor.check_consistency`` returns in the user's own code, and what it raises."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.model.rank_words import rank_list

MAX_NAMED = 5
"""Differences that a message names; all are in the result. Ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor or setting of which ranks hold different values."""

    what: str
    """"parameter", "gradient", "buffer", "optimizer state" or "optimizer setting"."""
    name: str
    """As in the module, without ``module.``; of a setting its own, as "lr", or "group 1: lr"."""
    part: str
    """Of optimizer state, which: "exp_avg"; else empty."""
    sides: tuple[tuple[int, ...], ...]
    """Global ranks with equal values, the most ranks first."""
    values: tuple[str, ...]
    """By side: the value of a setting, "float32[8, 16]" of a tensor, "none" where there is none."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the minority; all ranks where more than half do not agree."""
        everybody = tuple(sorted(rank for side in self.sides for rank in side))
        if 2 * len(self.sides[0]) <= len(everybody):
            return everybody
        return tuple(rank for rank in everybody if rank not in self.sides[0])

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
    """Whether the replicas of a group are equal, the same on all its ranks."""

    equal: bool
    differences: tuple[TensorDifference, ...]
    """Settings of optimizers first, as they explain the rest; then parameters, buffers, gradients, optimizer state."""
    ranks: tuple[int, ...]
    """The global ranks that were compared."""
    compared: int
    """Tensors and settings that this rank put forward."""
    left_out: tuple[str, ...]
    """What was not compared on this rank, and why, a phrase each."""

    @property
    def text(self) -> str:
        """Return one sentence that says how it came out, and names the first differences."""
        who = rank_list(self.ranks)
        if self.equal:
            return f"replicas are equal on {who}: {self.compared} tensors and settings compared"
        named = "; ".join(map(str, self.differences[:MAX_NAMED]))
        more = len(self.differences) - MAX_NAMED
        return f"replicas differ on {who}: {named}" + (f"; and {more} more" if more > 0 else "")

    def __bool__(self) -> bool:
        return self.equal


class ConsistencyError(RuntimeError):
    """Replicas that should be equal are not. The message names tensors and ranks; ``result`` has all of them."""

    def __init__(self, result: ConsistencyResult) -> None:
        """Keep the result."""
        super().__init__(result.text)
        self.result = result
