"""The parameters of a model that get gradients, that no optimizer holds, and that nothing else changes either."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ..storage import fingerprint_layout
from . import optimizers

MAX_NAMES = 5
MAX_NAME = 120
MIN_STILL = 2
"""Points in a row at which a parameter was as before. Ours: what is trained without an optimizer changes by then."""


class Untrained:
    """What is known of one model by now."""

    def __init__(self) -> None:
        self._still: Dict[str, Tuple[bytes, int]] = {}
        """By name: its fingerprint, and at how many points in a row it was the same."""

    def look(self, named: List[Tuple[str, Any]], prints: bytes, optimizer: Any, others: List[Any]) -> Dict[str, Any]:
        """Return the names of such parameters, first those that came after the optimizer that steps now.

        ``prints`` begin with those of the parameters, in the order of ``named``.
        """
        everybody = [*optimizers.optimizers(), *others]
        held = {id(tensor) for one in everybody for group in one.param_groups for tensor in group["params"]}
        still: Dict[str, Tuple[bytes, int]] = {}
        late: List[str] = []
        early: List[str] = []
        for i, (name, tensor) in enumerate(named):
            if id(tensor) in held or not tensor.requires_grad or tensor.grad is None:
                continue
            value = prints[i * fingerprint_layout.FINGERPRINT_SIZE : (i + 1) * fingerprint_layout.FINGERPRINT_SIZE]
            before, times = self._still.get(name, (b"", 0))
            still[name] = (value, times + 1 if value == before else 0)
            if still[name][1] >= MIN_STILL:
                (late if optimizers.is_later_than(tensor, optimizer) else early).append(name[:MAX_NAME])
        self._still = still
        return {"untrained": (late + early)[:MAX_NAMES], "untrained_count": len(late + early), "late": len(late)}
