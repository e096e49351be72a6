"""The likely cause of a difference, in words, and whom it shows to be at fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .blame import DriftBlame


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftCause:
    """Why replicas differ."""

    name: str
    """Findings of one code and one cause become one."""
    words: str
    """A clause that can follow a colon."""
    fix: str
    blame: DriftBlame | None = None
    """Whom the cause itself shows; None where only the tensors tell who differs."""
    unsynchronised: bool = False
    """Gradients were not reduced, which a script may want that averages parameters by itself."""
    at_the_step: bool = False
    """The fault stands at, or right before, the line that makes the step."""
    evidence: tuple[str, ...] = ()
