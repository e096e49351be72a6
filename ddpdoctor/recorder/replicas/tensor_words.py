"""Reads tensors of every kind as 64-bit words, without a copy if their memory is contiguous and aligned."""

from __future__ import annotations

from typing import Sequence

import torch

WORD = 8
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8))
"""Dtypes that every torch version can copy and concatenate. The others are read as integers of the same size."""
USUAL = frozenset((torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)))


def plain_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the plain tensors whose elements, in logical order, are this one's contents; empty if they are unknown."""
    kind = type(tensor)
    if kind in USUAL and tensor.dtype in PLAIN and tensor.layout is torch.strided and not tensor.is_meta:
        return () if tensor.is_nested else (tensor.resolve_neg() if tensor.is_neg() else tensor,)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return _inner_parts(tensor)
    if tensor.layout is not torch.strided:
        return _sparse_parts(tensor)
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return ()
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):  # a lazy module's, which has no shape yet
        return ()
    return (_of_known_dtype(tensor),)


def _inner_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the parts of a wrapper class that names its inner tensors. A DTensor's are a shard, or not there yet."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor).__module__.startswith("torch.distributed"):
        return ()
    found = [plain_parts(getattr(tensor, name)) for name in flatten()[0]]
    return [part for parts in found for part in parts] if all(found) else ()


def _sparse_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the parts of a sparse tensor; empty if uncoalesced, when equal tensors can have different entries."""
    if tensor.layout is torch.sparse_coo:
        return _all_known(tensor._indices(), tensor._values()) if tensor.is_coalesced() else ()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return _all_known(tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return _all_known(tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def _all_known(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    return [_of_known_dtype(tensor) for tensor in tensors]


def _of_known_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bits in a dtype that every torch version can copy and concatenate."""
    if tensor.dtype in PLAIN:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    size = tensor.element_size()
    return torch.view_as_real(tensor) if size > WORD else tensor.view(INTEGERS[size])


def in_order(tensor: torch.Tensor) -> bool:
    """Return whether words can be read in place."""
    return (
        tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.data_ptr() % WORD == 0
        and tensor.storage_offset() * tensor.element_size() % WORD == 0
    )


def copy_range(tensor: torch.Tensor, first: int, into: torch.Tensor) -> None:
    """Fill the one-dimensional ``into`` with elements of ``tensor`` from index ``first`` on, in logical order."""
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
