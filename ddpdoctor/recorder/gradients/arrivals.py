"""Looks at gradients as each is there, where DDP would have reduced them in place by the end of backward.

That is so for gradients that are views of DDP's buckets, for sparse ones, and where checkpointing runs a backward
inside another. A hook stands on each parameter; where DDP tells its buckets, their gradients are looked at together.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Sequence, Set, Tuple

from ..state import here
from .finite_checks import has_finite_sum, is_finite, quietly, samples_of

ASKED = 8
"""Backwards before which DDP is asked for its buckets, which it arranges anew after the first. Ours."""
MOST_FAILED = 2
"""Backwards that may leave out what is expected before nothing is. Ours: the same layers are unused, or ever others."""


class Arrivals:
    """The gradients of some parameters, in each backward from their arrival on."""

    def __init__(self, parameters: Dict[int, Any]) -> None:
        self._parameters = parameters
        self._asked = 0
        self._failed = 0
        """Backwards in which a bucket got less than it was expected to."""
        self._buckets: List[List[int]] = []
        self._bucket_of: Dict[int, int] = {}
        self._left: List[Set[int]] = []
        """Of each bucket, what is still to come in this backward."""
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
            buckets = _buckets_of(ddp, list(self._parameters.values()))
            if sorted(i for bucket in buckets for i in bucket) == sorted(self._parameters):
                self._plan(buckets)
        self._left = [set(bucket) for bucket in self._buckets]

    def _plan(self, buckets: List[List[int]]) -> None:
        self._buckets = buckets
        self._bucket_of = {i: number for number, bucket in enumerate(buckets) for i in bucket}

    def rest(self) -> None:
        """Look at nothing until a backward begins: this one has ended, or failed."""
        self.awake = False

    def end(self) -> Tuple[Dict[int, bool], List[Tuple[int, Any]]]:
        """Return which gradients of this backward hold inf or NaN, and whether NaN; samples of those that GPUs hold."""
        self.awake = False
        if any(self._left):
            self._expect_less()
        return self._bad, self._maxima

    def _expect_less(self) -> None:
        """Expect no gradient where there was none: its bucket had no end for us. Where that changes, expect no buckets.

        DDP counts a parameter that is not used as ready; what comes beyond expectation is looked at by itself.
        """
        self._failed += 1
        self._asked = ASKED
        came = [[i for i in bucket if i not in left] for bucket, left in zip(self._buckets, self._left)]
        self._plan([bucket for bucket in came if bucket] if self._failed < MOST_FAILED else [])

    def _arrived(self, i: int, _parameter: Any) -> None:
        if not self.awake:
            return
        try:
            number = self._bucket_of.get(i)
            if number is None:
                self._look([i])
                return
            left = self._left[number]
            left.discard(i)
            if not left:
                self._look(self._buckets[number])
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            self.awake = False
            here.failed("gradients", error)

    @quietly
    def _look(self, indexes: Sequence[int]) -> None:
        grads = [(i, self._parameters[i].grad) for i in indexes]
        dense = [(i, grad._values() if grad.is_sparse else grad) for i, grad in grads if grad is not None]
        if any(grad.is_cuda for _, grad in dense):
            samples = samples_of([grad for _, grad in dense])
            self._maxima += [(i, sample) for (i, _), sample in zip(dense, samples)]
        elif not has_finite_sum([grad for _, grad in dense]):
            self._bad.update((i, bool(grad.isnan().any())) for i, grad in dense if not is_finite(grad))


def _buckets_of(ddp: Any, parameters: List[Any]) -> List[List[int]]:
    """Return which parameters DDP reduces together, in the order of the model; none where it does not tell."""
    told = ddp._get_ddp_logging_data()
    rebuilt = told.get("rebuilt_per_bucket_param_indices", "")
    if not rebuilt and ddp.find_unused_parameters and not ddp.static_graph:
        return _first_buckets(parameters, told.get("bucket_sizes", ""))  # these stay
    return [[int(i) for i in part.split()] for part in rebuilt.split(",") if part.strip()]


def _first_buckets(parameters: List[Any], sizes: str) -> List[List[int]]:
    """Return the buckets of the constructor, which go through the parameters from the last to the first.

    Told are their sizes in bytes. None where those do not fit: parameters of several types are sorted by type first.
    """
    buckets: List[List[int]] = []
    place = len(parameters)
    for size in [int(part) for part in sizes.split(",") if part.strip()]:
        bucket: List[int] = []
        taken = 0
        while taken < size and place:
            place -= 1
            bucket.append(place)
            taken += parameters[place].numel() * parameters[place].element_size()
        if taken != size:
            return []
        buckets.append(bucket)
    return [] if place else buckets
