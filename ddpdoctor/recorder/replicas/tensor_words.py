"""Reads tensors of every kind as words of 64 bits, without a copy where their memory is in order."""

from __future__ import annotations

from typing import Sequence

import torch

WORD = 8
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8))
"""Which every torch copies and joins as they are. The others are read as integers of their size."""
USUAL = frozenset((torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)))


def plain_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the plain tensors whose elements, in logical order, are all that this one holds; none where untold."""
    kind = type(tensor)
    if kind in USUAL and tensor.dtype in PLAIN and tensor.layout is torch.strided and not tensor.is_meta:
        return () if tensor.is_nested else (tensor.resolve_neg() if tensor.is_neg() else tensor,)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return _inner_parts(tensor)
    if tensor.layout is not torch.strided:
        return _sparse_parts(tensor)
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested or _not_initialised(tensor):
        return ()
    return (_of_known_dtype(tensor),)


def _inner_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Look into a class that wraps tensors and says which; a DTensor's are a shard, or not there yet."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor).__module__.startswith("torch.distributed"):
        return ()
    found = [plain_parts(getattr(tensor, name)) for name in flatten()[0]]
    return [part for parts in found for part in parts] if all(found) else ()


def _sparse_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Entries that are still to be added up could be split in many ways that are equal."""
    if tensor.layout is torch.sparse_coo:
        return _all_known(tensor._indices(), tensor._values()) if tensor.is_coalesced() else ()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return _all_known(tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return _all_known(tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def _all_known(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    return [_of_known_dtype(tensor) for tensor in tensors]


def _not_initialised(tensor: torch.Tensor) -> bool:
    """Of lazy modules' parameters, which have no shape yet."""
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def _of_known_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bits in a dtype that every torch copies and joins."""
    if tensor.dtype in PLAIN:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    size = tensor.element_size()
    return torch.view_as_real(tensor) if size > WORD else tensor.view(INTEGERS[size])


def in_order(tensor: torch.Tensor) -> bool:
    """Tell whether words can be read where the elements lie."""
    return (
        tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.data_ptr() % WORD == 0
        and tensor.storage_offset() * tensor.element_size() % WORD == 0
    )


def copy_range(tensor: torch.Tensor, first: int, into: torch.Tensor) -> None:
    """Copy to ``into``, which has one dimension, as many elements as it has, from the ``first``, in logical order."""
    if tensor.dim() <= 1:
        into.copy_(tensor.reshape(-1)[first : first + into.numel()])
        return
    size = tensor[0].numel()
    done = 0
    while done < into.numel():
        row, skipped = divmod(first + done, size)
        rows = (into.numel() - done) // size if skipped == 0 else 0
        if rows:
            whole = tensor[row : row + rows]
            into[done : done + rows * size].view(whole.shape).copy_(whole)
            done += rows * size
        else:
            count = min(size - skipped, into.numel() - done)
            copy_range(tensor[row], skipped, into[done : done + count])
            done += count
