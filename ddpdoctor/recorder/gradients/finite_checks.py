"""Checks, in one pass and as cheaply as each device allows, whether tensors hold inf or NaN. Changes none of them."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from ..capture import is_capturing
from ..state import pass_on

SMALL = 8192
"""Tensors of up to this many elements are copied together and summed. Our choice: above it separate sums cost less."""
PIECE = 65536
"""The most elements that are copied together: 256 KiB of float32."""
MAX_VISITED = 64
"""Objects that are searched for tensors in a model's arguments or results. Our choice."""
_LEAVES = (str, bytes, int, float, type(None))


def is_plain(tensor: Any) -> bool:
    """Return whether a sum can find inf or NaN in a tensor: it is dense, floating or complex, and no subclass."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.device.type not in ("cpu", "cuda"):
        return False
    return bool((tensor.is_floating_point() and tensor.element_size() > 1) or tensor.is_complex())


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of ours run without gradients, and hidden from torch function modes of the script."""

    def run(*args: Any) -> Any:
        import torch

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
    import torch

    return bool(torch._C._len_torch_dispatch_stack()) or torch.compiler.is_compiling() or is_capturing()


def pieces_of(tensors: Iterable[Any]) -> List[List[Any]]:
    """Divide tensors into the groups in which they are summed."""
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


def has_finite_sum(tensors: Iterable[Any]) -> bool:
    """Return whether tensors have a finite sum. If so, they hold no inf or NaN; huge finite numbers may overflow."""
    return math.isfinite(sum(map(_sum_together, pieces_of(tensors))))


def have_finite_gradients(pieces: List[List[Any]]) -> bool:
    """Return whether the gradients of parameters have a finite sum. ``pieces`` comes from ``pieces_of``."""
    return math.isfinite(sum([_sum_together([parameter.grad for parameter in piece]) for piece in pieces]))


def _sum_together(tensors: List[Any]) -> float:
    """Return the sum of tensors, skipping those that are None."""
    import torch

    if len(tensors) == 1:
        return 0.0 if tensors[0] is None else _sum(tensors[0])
    try:
        return _sum(torch._C._nn.flatten_dense_tensors(tensors))
    except TypeError as error:  # cheaper than checking each one for None
        pass_on(error)
        present = [tensor for tensor in tensors if tensor is not None]
        return _sum_together(present) if present else 0.0


def _sum(tensor: Any) -> float:
    return float(abs(_sum_of(tensor).item()))


def _sum_of(tensor: Any) -> Any:
    import torch

    if tensor.dtype is torch.float16:  # the sum of many soon exceeds the largest float16
        return tensor.sum(dtype=torch.float32)
    return tensor.sum()


def samples_of(tensors: Sequence[Any]) -> List[Any]:
    """Return a number for each tensor, on its own device, that is inf or NaN if the tensor holds such.

    On a GPU it is the greatest magnitude, computed at once for all tensors of one device and dtype, without a wait.
    """
    import torch

    found = [_empty_or_sum(tensor) if not (tensor.is_cuda and tensor.numel()) else None for tensor in tensors]
    for indexes in _by_kind(tensors, [i for i, sample in enumerate(found) if sample is None]):
        for i, sample in zip(indexes, torch._foreach_norm([tensors[i] for i in indexes], math.inf)):
            found[i] = sample
    return found


def _empty_or_sum(tensor: Any) -> Any:
    """Return the sum, or 0 for an empty tensor on a GPU, for whose maximum torch would raise."""
    return _sum_of(tensor) if tensor.numel() or not tensor.is_cuda else tensor.new_zeros(())


def _by_kind(tensors: Sequence[Any], indexes: Sequence[int]) -> List[List[int]]:
    """Group the indexes of tensors by device and dtype."""
    kinds: Dict[Any, List[int]] = {}
    for i in indexes:
        kinds.setdefault((tensors[i].device, tensors[i].dtype), []).append(i)
    return list(kinds.values())


def is_finite(tensor: Any) -> bool:
    """Return whether a tensor holds neither inf nor NaN."""
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

    def __init__(self, named: List[Tuple[str, Any]]) -> None:
        self._named = named
        self._at_first: Any = None
        self._check()

    @quietly
    def _check(self) -> None:
        """Check all parameters. Results from GPUs are read later, on demand."""
        if any(tensor.is_cuda for _, tensor in self._named):
            self._at_first = Maxima(samples_of([tensor.detach() for _, tensor in self._named]))
        elif not has_finite_sum(tensor for _, tensor in self._named):
            self._named = [(name, tensor) for name, tensor in self._named if is_finite(tensor)]

    @quietly
    def first_ruined(self) -> Optional[str]:
        """Return the name of the first such parameter that holds inf or NaN now, or None."""
        at_first, self._at_first = self._at_first, None
        if at_first is not None:
            self._named = [pair for pair, value in zip(self._named, at_first.wait()) if math.isfinite(value)]
        place = next(not_finite(tensor for _, tensor in self._named), None)
        return None if place is None else self._named[place][0]


class Maxima:
    """Samples of tensors (``samples_of``) on their way from GPUs to the host."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.count = len(samples)
        kinds = _by_kind(samples, range(len(samples)))
        self._parts = [(indexes, _sent([samples[i] for i in indexes])) for indexes in kinds]

    def have_come(self) -> bool:
        """Return whether all samples are on the host. Never waits."""
        return all(event is None or event.query() for _, (_, event) in self._parts)

    def values(self) -> List[float]:
        """Return the values in the order of the samples. Call it only after they have come."""
        found = [0.0] * self.count
        for indexes, (host, _) in self._parts:
            for i, value in zip(indexes, host.tolist()):
                found[i] = value
        return found

    def wait(self) -> List[float]:
        """Wait until the values have come, and return them."""
        for _, (_, event) in self._parts:
            if event is not None:
                event.synchronize()
        return self.values()


def _sent(samples: List[Any]) -> Tuple[Any, Any]:
    """Return samples in host memory, and the event after which they are there, or None for samples from the CPU."""
    import torch

    maxima = torch.stack(samples)
    # A finite float64 can be inf as float32, so double. A complex sum has no order, so its magnitude is taken.
    maxima = (maxima.abs() if maxima.is_complex() else maxima).double()
    if not maxima.is_cuda:
        return maxima, None
    host = torch.empty(maxima.shape, dtype=maxima.dtype, device="cpu", pin_memory=True)
    host.copy_(maxima, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(maxima.device))
    return host, event


def tensors_in(value: Any, label: str) -> List[Tuple[str, Any]]:
    """Return the first plain tensors in a nest of lists, dicts and objects, with a name for each."""
    import torch

    found: List[Tuple[str, Any]] = []
    nests = [(label, value)]
    for label, value in nests:  # noqa: PLR1704 - the items of each nest are appended to the list
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                found.append((label, value))
        elif not isinstance(value, _LEAVES):
            space = MAX_VISITED - len(nests)
            nests += [("%s[%r]" % (label, key), item) for key, item in islice(_items(value), max(space, 0))]
    return found


def _items(value: Any) -> Iterable[Tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return list((value if isinstance(value, dict) else getattr(value, "__dict__", {})).items())
