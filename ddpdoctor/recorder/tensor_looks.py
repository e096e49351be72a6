"""Tells, in one pass and as cheaply as each device allows, whether tensors hold inf or NaN. Changes none of them."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

SMALL = 8192
"""Elements up to which tensors are summed together, through a copy. Ours: above it a sum of its own costs less."""
PIECE = 65536
"""Elements that are copied together at most: 256 KiB of float32."""
MAX_VISITED = 64
"""Things among which tensors are looked for in what a model is given or returns. Ours."""
_LEAVES = (str, bytes, int, float, type(None))


def is_plain(tensor: Any) -> bool:
    """Return whether a sum says something of a tensor: dense, of floating or complex numbers, with data of its own."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.device.type not in ("cpu", "cuda"):
        return False
    return bool((tensor.is_floating_point() and tensor.element_size() > 1) or tensor.is_complex())


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function of ours run without gradients, and unseen by modes that the script has switched on."""

    def run(*args: Any) -> Any:
        import torch

        with torch.no_grad(), torch._C.DisableTorchFunction():
            return function(*args)

    return run


def is_observed() -> bool:
    """Return whether somebody counts or replaces each operation at the moment, or captures them as a CUDA graph."""
    import torch

    if torch._C._len_torch_dispatch_stack():
        return True
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def pieces_of(tensors: Iterable[Any]) -> List[List[Any]]:
    """Return tensors in the portions in which they are summed."""
    pieces: List[List[Any]] = []
    together: List[Any] = []
    room = PIECE
    for tensor in tensors:
        count = tensor.numel()
        if count > SMALL:
            pieces.append([tensor])
            continue
        if count > room:
            pieces.append(together)
            together, room = [], PIECE
        together.append(tensor)
        room -= count
    return [*pieces, together] if together else pieces


def has_finite_sum(tensors: Iterable[Any]) -> bool:
    """Return whether tensors have a finite sum: then they hold no inf or NaN. Huge numbers may have none."""
    return math.isfinite(sum(map(_sum_together, pieces_of(tensors))))


def have_finite_gradients(pieces: List[List[Any]]) -> bool:
    """Return whether the gradients of parameters, in portions, have a finite sum."""
    return math.isfinite(sum([_sum_together([parameter.grad for parameter in piece]) for piece in pieces]))


def _sum_together(tensors: List[Any]) -> float:
    """Return the sum of tensors, without those that are None."""
    import torch

    if len(tensors) == 1:
        return 0.0 if tensors[0] is None else _sum(tensors[0])
    try:
        return _sum(torch._C._nn.flatten_dense_tensors(tensors))
    except TypeError:  # cheaper than to look at each
        present = [tensor for tensor in tensors if tensor is not None]
        return _sum_together(present) if present else 0.0


def _sum(tensor: Any) -> float:
    return float(abs(_sum_of(tensor).item()))


def _sum_of(tensor: Any) -> Any:
    import torch

    if tensor.dtype is torch.float16:  # the sum of many is soon larger than the largest number of this type
        return tensor.sum(dtype=torch.float32)
    return tensor.sum()


def sample_of(tensor: Any) -> Any:
    """Return a number, on the tensor's own device, that is inf or NaN where the tensor holds such."""
    import torch

    return torch._foreach_norm([tensor], math.inf)[0] if tensor.is_cuda else _sum_of(tensor)


def is_finite(tensor: Any) -> bool:
    """Return whether a tensor holds neither inf nor NaN."""
    return bool(tensor.isfinite().all())


def first_ruined(named: Iterable[Tuple[str, Any]]) -> Optional[str]:
    """Return the name of the first tensor that holds inf or NaN; None where there is none."""
    return next((name for name, tensor in named if is_plain(tensor) and not is_finite(tensor)), None)


class Maxima:
    """The greatest magnitudes of tensors, on their way from GPUs to the host: inf or NaN where a tensor holds such."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.count = len(tensors)
        kinds: Dict[Any, List[int]] = {}
        for i, tensor in enumerate(tensors):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(i)
        self._parts = [(indexes, _sent([tensors[i] for i in indexes])) for indexes in kinds.values()]

    def have_come(self) -> bool:
        """Return whether they are on the host. Never waits."""
        return all(event is None or event.query() for _, (_, event) in self._parts)

    def values(self) -> List[float]:
        """Return them in the order of the tensors, once they have come."""
        found = [0.0] * self.count
        for indexes, (host, _) in self._parts:
            for i, value in zip(indexes, host.tolist()):
                found[i] = value
        return found


def _sent(tensors: List[Any]) -> Tuple[Any, Any]:
    """Return the maxima in memory of the host, and the event after which they are there; no event on the CPU."""
    import torch

    maxima = torch.stack(torch._foreach_norm(tensors, math.inf)).float()
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
    for label, value in nests:  # noqa: PLR1704 - a nest's own items are put behind all others
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                found.append((label, value))
        elif not isinstance(value, _LEAVES):
            room = MAX_VISITED - len(nests)
            nests += [("%s[%r]" % (label, key), item) for key, item in islice(_items(value), max(room, 0))]
    return found


def _items(value: Any) -> Iterable[Tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return list((value if isinstance(value, dict) else getattr(value, "__dict__", {})).items())
