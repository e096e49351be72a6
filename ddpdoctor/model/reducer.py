"""Complaints of DDP's reducer about gradients that it missed or got twice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame


class Fault(str, Enum):
    """What is wrong with the gradients of some parameters."""

    UNFINISHED = "unfinished"
    """A backward did not compute them, and DDP waits for them."""
    STATIC = "static"
    """The same with ``static_graph=True``: they had gradients in the first step."""
    TWICE = "twice"
    """Autograd gave them twice for one forward of DDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerSaid:
    """Parameters of a DDP model whose gradients did not come, or came twice, on one rank."""

    what: Fault
    names: tuple[str, ...]
    """The first names in the order of the model; empty if the model is unknown."""
    count: int
    of: int
    """Number of parameters that DDP reduces, or 0 if the model is unknown."""
    outputs: tuple[str, ...] = ()
    """Variables of the script that were computed from them but not used in the loss."""
    site: Frame | None = None
    """The user's line that called this backward, if it was recorded."""
