"""Checks gradients as they arrive, because DDP would have reduced these in place by the end of backward.

It does so with gradients that are views of its buckets, with sparse ones, and when checkpointing runs a backward inside
another. Each parameter has a hook. If DDP reports its buckets, all gradients of a bucket are checked together.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Sequence, Set, Tuple

from ..state import here, shielded
from .finite_checks import has_finite_sum, is_finite, quietly, samples_of

ASKED = 8
"""Backwards before which DDP is asked for its buckets, which it rebuilds after the first. Our choice."""
MOST_FAILED = 2
"""Backwards that may leave out expected gradients before buckets are given up. Our choice: a model leaves out either
the same layers or different ones each time."""


class ArrivingGradients:
    """The gradients of some parameters, checked in each backward as they arrive."""

    def __init__(self, parameters: Dict[int, Any]) -> None:
        self._parameters = parameters
        self._asked = 0
        self._failed = 0
        """Backwards in which a bucket did not get all of its expected gradients."""
        self._buckets: List[List[int]] = []
        self._bucket_of: Dict[int, int] = {}
        self._left: List[Set[int]] = []
        """For each bucket: the gradients that are still to come in this backward."""
        self._maxima: List[Tuple[int, Any]] = []
        self._bad: Dict[int, bool] = {}
        self.awake = False
        for i, parameter in parameters.items():
            arrived = functools.partial(self._arrived, i)
            # On a GPU it is not the main thread that calls it, which alone is interrupted by signal handlers.
            hook = arrived if parameter.is_cuda else shielded("gradients", arrived)
            parameter.register_post_accumulate_grad_hook(hook)

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
        """Stop checking until the next backward begins: this one has ended or failed."""
        self.awake = False

    def end(self) -> Tuple[Dict[int, bool], List[Tuple[int, Any]]]:
        """Return the gradients with inf or NaN and whether it is NaN, and samples of the gradients on GPUs."""
        self.awake = False
        if any(self._left):
            self._expect_less()
        return self._bad, self._maxima

    def _expect_less(self) -> None:
        """Expect from now on only the gradients that came, so that each bucket can be completed.

        If that changes again, expect no buckets at all. DDP counts an unused parameter as ready. A gradient that comes
        unexpectedly is checked by itself.
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
                self._check([i])
                return
            left = self._left[number]
            left.discard(i)
            if not left:
                self._check(self._buckets[number])
        except Exception as error:  # noqa: BLE001 - the recorder's wall
            here.failed("gradients", error)
            self.awake = False

    @quietly
    def _check(self, indexes: Sequence[int]) -> None:
        grads = [(i, self._parameters[i].grad) for i in indexes]
        dense = [(i, grad._values() if grad.is_sparse else grad) for i, grad in grads if grad is not None]
        if any(grad.is_cuda for _, grad in dense):
            samples = samples_of([grad for _, grad in dense])
            self._maxima += [(i, sample) for (i, _), sample in zip(dense, samples)]
        elif not has_finite_sum([grad for _, grad in dense]):
            self._bad.update((i, bool(grad.isnan().any())) for i, grad in dense if not is_finite(grad))


def _buckets_of(ddp: Any, parameters: List[Any]) -> List[List[int]]:
    """Return which parameters DDP reduces together, by position in the model; empty if DDP does not report it."""
    logged = ddp._get_ddp_logging_data()
    rebuilt = logged.get("rebuilt_per_bucket_param_indices", "")
    if not rebuilt and ddp.find_unused_parameters and not ddp.static_graph:
        return _first_buckets(parameters, logged.get("bucket_sizes", ""))  # DDP does not rebuild these
    return [[int(i) for i in part.split()] for part in rebuilt.split(",") if part.strip()]


def _first_buckets(parameters: List[Any], sizes: str) -> List[List[int]]:
    """Return the constructor's buckets from their sizes in bytes. They take the parameters from the last to the first.

    The result is empty if the sizes do not fit. Parameters of several dtypes, for example, are sorted by dtype first.
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
