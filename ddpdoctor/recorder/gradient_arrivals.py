"""Looks at gradients as each is there, where DDP would have reduced them in place by the end of backward.

That is so for gradients that are views of DDP's buckets, for sparse ones, and where checkpointing runs a backward
inside another. A hook stands on each parameter; where DDP tells its buckets, their gradients are looked at together.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Sequence, Tuple

from .state import here
from .tensor_looks import has_finite_sum, is_finite, quietly, sample_of

ASKED = 8
"""Backwards before which DDP is asked for its buckets, which it arranges anew after the first. Ours."""


class Arrivals:
    """The gradients of some parameters, in each backward from their arrival on."""

    def __init__(self, parameters: Dict[int, Any]) -> None:
        self._parameters = parameters
        self._asked = 0
        self._buckets: List[List[int]] = []
        self._bucket_of: Dict[int, int] = {}
        self._left: List[int] = []
        self._maxima: List[Tuple[int, Any]] = []
        self._bad: Dict[int, bool] = {}
        self.awake = False
        for i, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, i))

    def begin(self, ddp: Any) -> None:
        """Begin a backward."""
        self.awake = True
        self._bad, self._maxima = {}, []
        if not self._buckets and self._asked < ASKED:
            self._asked += 1
            self._plan(_buckets_of(ddp))

    def _plan(self, buckets: List[List[int]]) -> None:
        if sorted(i for bucket in buckets for i in bucket) == sorted(self._parameters):
            self._buckets = buckets
            self._bucket_of = {i: number for number, bucket in enumerate(buckets) for i in bucket}
            self._left = [len(bucket) for bucket in buckets]

    def end(self) -> Tuple[Dict[int, bool], List[Tuple[int, Any]]]:
        """Return which gradients of this backward hold inf or NaN, and whether NaN; maxima of those that GPUs hold."""
        self.awake = False
        if self._left != [len(bucket) for bucket in self._buckets]:  # some had no gradient, and their bucket no end
            self._buckets, self._bucket_of, self._left = [], {}, []
            self._asked = ASKED
        return self._bad, self._maxima

    def _arrived(self, i: int, _parameter: Any) -> None:
        if not self.awake:
            return
        try:
            if not self._buckets:
                self._look([i])
                return
            number = self._bucket_of[i]
            self._left[number] -= 1
            if not self._left[number]:
                self._left[number] = len(self._buckets[number])
                self._look(self._buckets[number])
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            self.awake = False
            here.failed("gradients", error)

    @quietly
    def _look(self, indexes: Sequence[int]) -> None:
        grads = [(i, self._parameters[i].grad) for i in indexes]
        dense = [(i, grad._values() if grad.is_sparse else grad) for i, grad in grads if grad is not None]
        if any(grad.is_cuda for _, grad in dense):
            self._maxima += [(i, sample_of(grad)) for i, grad in dense]
        elif not has_finite_sum([grad for _, grad in dense]):
            self._bad.update((i, bool(grad.isnan().any())) for i, grad in dense if not is_finite(grad))


def _buckets_of(ddp: Any) -> List[List[int]]:
    """Return which parameters DDP reduces together, in the order of the model; none where it does not tell."""
    told = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [[int(i) for i in part.split()] for part in told.split(",") if part.strip()]
