"""Checks, in one pass and as cheaply as each device allows, whether tensors hold inf or NaN. Changes none of them.

Gradients that DDP would have reduced in place by the end of backward are checked as they arrive: views of its buckets,
sparse ones, and all where checkpointing runs a backward inside another. Findings are kept until a torch optimizer steps
with them, or parameters hold inf or NaN: a gradient that a script throws away does no harm.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from itertools import islice
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from .state import here, pass_on, shielded
from .step_clock import is_capturing

# Tensors of up to this many elements are copied together and summed. Our choice: above it separate sums cost less.
SMALL = 8192
PIECE = 65536  # the most elements that are copied together: 256 KiB of float32
MAX_VISITED = 64  # Objects that are searched for tensors in a model's arguments or results. Our choice.
_LEAVES = (str, bytes, int, float, type(None))


def is_plain(tensor: Any) -> bool:
    """Return whether a sum can find inf or NaN in a tensor: it is dense, floating or complex, and no subclass."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.device.type not in ("cpu", "cuda"):
        return False
    return bool((tensor.is_floating_point() and tensor.element_size() > 1) or tensor.is_complex())


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make one of our functions run without gradients, and hidden from torch function modes of the script."""

    def run(*args: Any) -> Any:
        # Not torch.no_grad: an exception from outside could end its Python code before it has restored the mode.
        had_gradients = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            with torch._C.DisableTorchFunction():
                return function(*args)
        finally:
            torch._C._set_grad_enabled(had_gradients)

    return run


def is_observed() -> bool:
    """Return whether a dispatch mode sees each operation now, or torch compiles, or a CUDA graph is captured."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch.compiler.is_compiling() or is_capturing()


def pieces_of(tensors: Iterable[Any]) -> List[List[Any]]:
    pieces: List[List[Any]] = []
    together: List[Any] = []
    space = PIECE
    for tensor in tensors:
        count = tensor.numel()
        if count > SMALL:
            pieces.append([tensor])
            continue
        if count > space:
            pieces.append(together)
            together, space = [], PIECE
        together.append(tensor)
        space -= count
    return [*pieces, together] if together else pieces


def has_finite_sum(pieces: Iterable[List[Any]]) -> bool:
    """Return whether tensors in ``pieces_of`` have a finite sum: then none has inf or NaN. Huge ones may overflow."""
    return math.isfinite(sum(map(_sum_together, pieces)))


def _sum_together(tensors: List[Any]) -> float:
    together = tensors[0]
    if len(tensors) > 1:
        try:
            together = torch._C._nn.flatten_dense_tensors(tensors)
        except TypeError as error:  # cheaper than checking each one for None
            pass_on(error)
            present = [tensor for tensor in tensors if tensor is not None]
            return _sum_together(present) if present else 0.0
    return 0.0 if together is None else float(abs(_sum_of(together).item()))


def _sum_of(tensor: Any) -> Any:
    # The sum of many soon exceeds the largest float16.
    return tensor.sum(dtype=torch.float32) if tensor.dtype is torch.float16 else tensor.sum()


def samples_of(tensors: Sequence[Any]) -> List[Any]:
    """Return a number for each tensor, on its own device, that is inf or NaN if the tensor holds such."""
    # On a GPU it is the greatest magnitude, computed at once for all tensors of one device and dtype, without a wait.
    # For the maximum of an empty tensor torch would raise.
    found = [_sum_of(t) if not t.is_cuda else None if t.numel() else t.new_zeros(()) for t in tensors]
    for indexes in _by_kind(tensors, [i for i, sample in enumerate(found) if sample is None]):
        for i, sample in zip(indexes, torch._foreach_norm([tensors[i] for i in indexes], math.inf)):
            found[i] = sample
    return found


def _by_kind(tensors: Sequence[Any], indexes: Sequence[int]) -> List[List[int]]:
    kinds: Dict[Any, List[int]] = {}
    for i in indexes:
        kinds.setdefault((tensors[i].device, tensors[i].dtype), []).append(i)
    return list(kinds.values())


def is_finite(tensor: Any) -> bool:
    return bool(tensor.isfinite().all())


def not_finite(tensors: Iterable[Any]) -> Iterator[int]:
    """Yield the indexes of the tensors that hold inf or NaN. Waits once for each GPU."""
    plain = [(i, tensor) for i, tensor in enumerate(tensors) if tensor is not None and is_plain(tensor)]
    on_gpu = [(i, tensor) for i, tensor in plain if tensor.is_cuda]
    yield from (i for i, tensor in plain if not tensor.is_cuda and not is_finite(tensor))
    if on_gpu:
        values = Maxima(samples_of([tensor for _, tensor in on_gpu])).wait()
        yield from (i for (i, _), value in zip(on_gpu, values) if not math.isfinite(value))


class Sound:
    """The parameters that were finite from the start. A script may have set others to inf on purpose."""

    @quietly
    def __init__(self, named: List[Tuple[str, Any]]) -> None:
        """Check all parameters. Results from GPUs are read later, on demand."""
        self._named = named
        self._at_first: Any = None
        if any(tensor.is_cuda for _, tensor in named):
            self._at_first = Maxima(samples_of([tensor.detach() for _, tensor in named]))
        elif not has_finite_sum(pieces_of(tensor for _, tensor in named)):
            self._named = [(name, tensor) for name, tensor in named if is_finite(tensor)]

    @quietly
    def first_ruined(self) -> Optional[str]:
        at_first, self._at_first = self._at_first, None
        if at_first is not None:
            self._named = [pair for pair, value in zip(self._named, at_first.wait()) if math.isfinite(value)]
        place = next(not_finite(tensor for _, tensor in self._named), None)
        return None if place is None else self._named[place][0]


class Maxima:
    """Samples of tensors (``samples_of``) on their way from GPUs to the host."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.count = len(samples)
        # Indexes of samples, these in host memory, and the event after which they are there; None from the CPU.
        self._parts: List[Tuple[List[int], Any, Any]] = []
        for indexes in _by_kind(samples, range(len(samples))):
            maxima = torch.stack([samples[i] for i in indexes])
            # A finite float64 can be inf as float32, so double. A complex sum has no order, so its magnitude is taken.
            maxima = (maxima.abs() if maxima.is_complex() else maxima).double()
            host, event = maxima, None
            if maxima.is_cuda:
                host = torch.empty(maxima.shape, dtype=maxima.dtype, device="cpu", pin_memory=True)
                host.copy_(maxima, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(maxima.device))
            self._parts.append((indexes, host, event))

    def have_come(self) -> bool:
        return all(event is None or event.query() for _, _, event in self._parts)

    def values(self) -> List[float]:
        """Return the values in the order of the samples. Call it only after they have come."""
        found = [0.0] * self.count
        for indexes, host, _ in self._parts:
            for i, value in zip(indexes, host.tolist()):
                found[i] = value
        return found

    def wait(self) -> List[float]:
        for _, _, event in self._parts:
            if event is not None:
                event.synchronize()
        return self.values()


def tensors_in(value: Any, label: str) -> List[Tuple[str, Any]]:
    found: List[Tuple[str, Any]] = []
    nests = [(label, value)]
    for label, value in nests:  # noqa: PLR1704 - the items of each nest are appended to the list
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                found.append((label, value))
        elif not isinstance(value, _LEAVES):
            named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            items = enumerate(value) if isinstance(value, (list, tuple)) else list(named.items())
            space = MAX_VISITED - len(nests)
            nests += [("%s[%r]" % (label, key), item) for key, item in islice(items, max(space, 0))]
    return found


ASKED = 8  # Backwards before which DDP is asked for its buckets, which it rebuilds after the first. Our choice.
# Backwards without all expected gradients before buckets are given up. Our choice: models leave out the same or others.
MOST_FAILED = 2


class ArrivingGradients:
    """The gradients of some parameters, checked in each backward as they arrive."""

    def __init__(self, parameters: Dict[int, Any]) -> None:
        self._parameters, self._asked = parameters, 0
        self._failed = 0  # backwards in which a bucket did not get all of its expected gradients
        self._buckets: List[List[int]] = []
        self._bucket_of: Dict[int, int] = {}
        self._left: List[Set[int]] = []  # for each bucket: the gradients that are still to come in this backward
        self._maxima: List[Tuple[int, Any]] = []
        self._bad: Dict[int, bool] = {}
        self.awake = False  # whether a backward runs that has neither ended nor failed
        for i, parameter in parameters.items():
            arrived = functools.partial(self._arrived, i)
            # On a GPU it is not the main thread that calls it, which alone is interrupted by signal handlers.
            hook = arrived if parameter.is_cuda else shielded("gradients", arrived)
            parameter.register_post_accumulate_grad_hook(hook)

    def begin(self, ddp: Any) -> None:
        self.awake = True
        self._bad, self._maxima = {}, []
        if not self._buckets and self._asked < ASKED:
            self._asked += 1
            logged = ddp._get_ddp_logging_data()
            rebuilt = logged.get("rebuilt_per_bucket_param_indices", "")
            buckets = [[int(i) for i in part.split()] for part in rebuilt.split(",") if part.strip()]
            if not rebuilt and ddp.find_unused_parameters and not ddp.static_graph:  # DDP does not rebuild these
                buckets = _first_buckets(list(self._parameters.values()), logged.get("bucket_sizes", ""))
            if sorted(i for bucket in buckets for i in bucket) == sorted(self._parameters):
                self._plan(buckets)
        self._left = [set(bucket) for bucket in self._buckets]

    def _plan(self, buckets: List[List[int]]) -> None:
        self._buckets = buckets
        self._bucket_of = {i: number for number, bucket in enumerate(buckets) for i in bucket}

    def end(self) -> Tuple[Dict[int, bool], List[Tuple[int, Any]]]:
        """Return the gradients with inf or NaN and whether it is NaN, and samples of the gradients on GPUs."""
        self.awake = False
        if any(self._left):
            # Only the gradients that came are expected from now on, so that buckets can be completed: DDP counts unused
            # parameters as ready. If that changes again, none is expected. Unexpected ones are checked by themselves.
            self._failed += 1
            self._asked = ASKED
            came = [[i for i in bucket if i not in left] for bucket, left in zip(self._buckets, self._left)]
            self._plan([bucket for bucket in came if bucket] if self._failed < MOST_FAILED else [])
        return self._bad, self._maxima

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
        elif not has_finite_sum(pieces_of(grad for _, grad in dense)):
            self._bad.update((i, bool(grad.isnan().any())) for i, grad in dense if not is_finite(grad))


def _first_buckets(parameters: List[Any], sizes: str) -> List[List[int]]:
    """Return the constructor's buckets, which take parameters from the last on, by size; empty if sizes do not fit."""
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


# Noted findings whose gradients were used, and as many whose were not. Our choice: users need mostly the first one.
MAX_NOTED = 8
# Scaled losses in a row without finite gradients that are noted. Our choice: 2**16, halved each time, is far below 1.
LONG_ROW = 20
INPUT, PARAMETER, LOSS, GRADIENT = "input", "parameter", "loss", "gradient"  # what was not finite first
_numbers = itertools.count(1)
_noted = {False: 0, True: 0}


class Findings:
    """The findings in one model. ``first_ruined`` returns the first parameter with inf or NaN, or None."""

    def __init__(self, first_ruined: Callable[[], Optional[str]]) -> None:
        self.first_ruined = first_ruined
        self._times = self._in_a_row = 0
        self._noted_row = False
        self._last: Dict[str, Any] = {}
        self.pending: Dict[str, Any] = {}  # the last finding for which it is not yet known whether it was used

    @property
    def are_enough(self) -> bool:
        return _noted[True] >= MAX_NOTED

    def saw_finite(self, reduces: bool) -> None:
        if reduces:
            self._in_a_row, self._noted_row = 0, False
        if self.pending:
            self.settle()

    def saw(self, entry: Dict[str, Any], reduces: bool) -> None:
        """Note a backward whose gradients are not finite. Those added up for one reduction are one finding."""
        if self.pending.get("step") == entry["step"]:
            self._count(self.pending, reduces)
            return
        self.settle()
        self._count(entry, reduces)
        self.pending = entry
        # A gradient scaler causes this now and then, and skips the step.
        of_scale = entry["origin"] == GRADIENT or (entry["origin"] == LOSS and not entry["loss_nan"])
        if not (entry["scaled"] and of_scale):
            self._note(entry)

    def _count(self, entry: Dict[str, Any], reduces: bool) -> None:
        if reduces:
            self._times += 1
            self._in_a_row += 1
        entry.update(times=self._times, row=self._in_a_row)
        if entry["scaled"] and self._in_a_row >= LONG_ROW and not self._noted_row:
            self._noted_row = True
            self._note(entry)

    def settle(self) -> None:
        """Decide whether the pending finding was used. If so, inf or NaN is in the parameters by now."""
        if self.pending and self.first_ruined() is not None:
            self.was_used()
        self.pending = {}

    def was_used(self) -> None:
        if not self.pending["used"]:
            self.pending["used"] = 1
            self._note(self.pending)

    def end(self) -> None:
        self.settle()
        if self._last and self._times > self._last["times"] and here.ring is not None:
            here.ring.note(dict(self._last, times=self._times))

    def _note(self, entry: Dict[str, Any]) -> None:
        used = bool(entry["used"])
        if here.ring is None or _noted[used] >= MAX_NOTED:
            return
        _noted[used] += 1
        entry.setdefault("id", next(_numbers))
        self._last = dict(entry, k="nonfinite", at=time.monotonic_ns())
        here.ring.note(self._last, vital=True)
        here.ring.set("nonfinite", sum(_noted.values()))
