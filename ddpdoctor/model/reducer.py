"""What DDP's reducer said of gradients that it missed, or got twice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame


class Fault(str, Enum):
    """What is wrong with the gradients of some parameters."""

    UNFINISHED = "unfinished"
    """A backward has left them out, and DDP waits for them."""
    STATIC = "static"
    """Likewise, with ``static_graph=True``: they had gradients in the first step."""
    TWICE = "twice"
    """Autograd gave them twice for one forward of DDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerSaid:
    """Parameters of a DDP model whose gradients did not come, or came twice, on one rank."""

    what: Fault
    names: tuple[str, ...]
    """The first of them, in the order of the model; none where the model was not known."""
    count: int
    of: int
    """Parameters that DDP reduces; 0 where the model was not known."""
    outputs: tuple[str, ...] = ()
    """Variables of the script that were computed from them: the loss did not use these."""
    site: Frame | None = None
    """The user's line that called the backward, where it was seen to end so."""
