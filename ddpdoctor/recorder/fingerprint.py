"""A checksum of tensors, 128 bits each: equal for equal values, whatever their memory layout and device.

A tensor's elements, in logical order, are read as 64-bit words, the last one padded with zeros. Blocks of 125 rows of
509 words are replaced by the sums of their rows and columns. Words that are left over, and small tensors, are used as
they are. Each sum or word goes, with its position, through a nonlinear mixer. The sum of the results is one half of the
fingerprint; the sum weighted by position is the other. All are integers modulo 2**64, so threads and devices do not
change a bit.

torch has no hash. A plain sum misses every permutation, and modulo 2**64 an even number of changes of a word's highest
bit, the sign of a float64. Row and column sums miss these only if their number is even in each row and column of a
block. Both have odd lengths, so no change of whole rows, columns or runs has that pattern. Sums run at memory speed,
and only one percent of the words then needs mixing. Bits are compared: -0.0 differs from 0.0, and so do NaNs.
"""

from __future__ import annotations

import array
import struct
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from .state import pass_on
from .step_clock import is_capturing
from .storage.fingerprint_file import ABSENT, FINGERPRINT_SIZE, UNKNOWN

__all__ = ["ABSENT", "FINGERPRINT_SIZE", "UNKNOWN", "Fingerprints", "fingerprints"]
COLUMNS = 509  # Words in a row. It defines the checksum, as do all constants here except the batch and chunk sizes.
# Rows in a block, odd as columns are. It is half a MiB, which stays in a core's cache. The last one may have fewer.
ROWS = 125
SMALL_WORDS = 4 * COLUMNS  # tensors of up to this many words are mixed directly, because two sums would take longer
# First positions of column sums and small tensors, of row sums, of left-over words, and of a tensor's next part.
COLUMNS_AT, ROWS_AT, REST_AT, PART_AT = 1, 2**40, 2**41, 2**48
# Odd numbers with random-looking bits: 2**64 over the golden ratio, murmur3's, and xorshift's. Signed, as in torch.
STEP, FACTOR, LENGTH = -0x61C8864680B583EB, -0x00AE502812AA7333, 0x2545F4914F6CDD1D
# Words that are mixed at once. Our choice: 128 KiB on a CPU; on an accelerator a batch takes 20 launches at any size.
BATCH_WORDS, GPU_BATCH_WORDS = 2**14, 2**20
# Blocks that one call sums on an accelerator: if they are copied first, and if not. Our choice: their sums fit a batch.
CHUNK_BLOCKS, WHOLE_BLOCKS = 32, 1024


def fingerprints(tensors: Sequence[Optional[torch.Tensor]]) -> bytes:
    """Return 16 bytes per tensor: ABSENT for None, UNKNOWN if the contents cannot be read. Never raises for a tensor.

    UNKNOWN are tensors without data (meta, fake, not initialized yet), shards (DTensor), quantized and nested ones,
    uncoalesced sparse ones, and those of classes that hide their data. All are UNKNOWN while torch.compile traces, and
    GPU tensors while a graph is captured. The fingerprint covers the size in bytes, but not shape and dtype.
    """
    return Fingerprints(tensors).value()


class Fingerprints:
    """Fingerprints of tensors as they are when this is made. Making it waits for no GPU; ``value`` waits once each."""

    def __init__(self, tensors: Sequence[Optional[torch.Tensor]]) -> None:
        self._parts: List[Any] = []
        if torch.compiler.is_compiling():
            self._parts = [ABSENT if tensor is None else UNKNOWN for tensor in tensors]
            return
        # No graph is left, and no mode of the caller sees the work. Dynamo must see these context managers by name. A
        # class of ours around them left gradients off after a compiled function.
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            try:
                self._parts = [_Together(tensors)]
            except Exception as error:  # noqa: BLE001  # one bad tensor must not spoil the others
                pass_on(error)
                for tensor in tensors:
                    try:
                        self._parts.append(_Together([tensor]))
                    except Exception as failure:  # noqa: BLE001  # a class that only looks like one, or no memory
                        pass_on(failure)
                        self._parts.append(UNKNOWN)

    def value(self) -> bytes:
        return b"".join([part if isinstance(part, bytes) else part.value() for part in self._parts])


class _Together:
    def __init__(self, tensors: Sequence[Optional[torch.Tensor]]) -> None:
        self._readers: Dict[torch.device, Reader] = {}
        self._sizes = [0] * len(tensors)
        self._without: List[Tuple[int, bytes]] = []
        for owner, tensor in enumerate(tensors):
            parts = () if tensor is None else plain_parts(tensor)
            if not parts:
                self._without.append((owner, ABSENT if tensor is None else UNKNOWN))
            for i, part in enumerate(parts):
                reader = self._readers.get(part.device)
                if reader is None:
                    reader = self._readers[part.device] = Reader(part.device)
                # Plus 1, so that a size of 0 counts too.
                self._sizes[owner] += (reader.take(owner, i * PART_AT, part) + 1) * (2 * i + 1)
        for reader in self._readers.values():
            reader.end()

    def value(self) -> bytes:
        """Return the fingerprints, all UNKNOWN if a device fails."""
        count = len(self._sizes)
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            try:
                sums = torch.tensor((self._sizes, self._sizes), dtype=torch.int64, device="cpu").t() * LENGTH
                for reader in self._readers.values():
                    mixed = [tensor for batch in reader.batches.values() for tensor in batch.mixed]
                    owners = [owner for batch in reader.batches.values() for owner in batch.owners]
                    if mixed:
                        places = torch.tensor(owners, dtype=torch.int64, device="cpu")
                        sums.index_add_(0, places, torch.cat(mixed).cpu())
                found = struct.pack("<%dq" % (2 * count), *sums.reshape(-1).tolist())
            except Exception as error:  # noqa: BLE001  # the script gets its own error
                pass_on(error)
                return UNKNOWN * count
        for owner, value in self._without:
            found = found[: owner * FINGERPRINT_SIZE] + value + found[(owner + 1) * FINGERPRINT_SIZE :]
        return found


class Reader:
    """Reads the words of tensors on one device. One transfer brings all results to the host."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and is_capturing():
            raise RuntimeError("what is done now would become part of the graph")
        self._device = device
        on_cpu = device.type == "cpu"
        self._chunk_rows = ROWS if on_cpu else ROWS * CHUNK_BLOCKS
        self._whole_rows = ROWS if on_cpu else ROWS * WHOLE_BLOCKS
        self._scratch: Optional[torch.Tensor] = None
        self.batches: Dict[torch.dtype, Batch] = {}

    def take(self, owner: int, position: int, tensor: torch.Tensor) -> int:
        size: int = tensor.numel() * tensor.element_size()
        if size <= SMALL_WORDS * WORD:
            if size:
                piece = tensor if tensor.dim() == 1 else tensor.reshape(-1)
                self._batch(tensor.dtype).add(owner, position + COLUMNS_AT, piece, size)
            return size
        sums = self._batch(torch.int64)
        width = COLUMNS * WORD // tensor.element_size()
        rows, left = divmod(tensor.numel(), width)
        if rows % ROWS and rows % ROWS % 2 == 0:
            rows, left = rows - 1, left + width
        whole = in_order(tensor)
        step = self._whole_rows if whole else self._chunk_rows
        for row in range(0, rows, step):
            count = min(step, rows - row)
            if whole:
                start = tensor.storage_offset() + row * width
                words = tensor.as_strided((count, width), (width, 1), start).view(torch.int64)
            else:
                if self._scratch is None:
                    self._scratch = torch.empty(self._chunk_rows, COLUMNS, dtype=torch.int64, device=self._device)
                words = self._scratch[:count]
                copy_range(tensor, row * width, words.view(tensor.dtype).view(-1))
            # The row sums run faster, so they come first and fill the caches.
            sums.add(owner, position + ROWS_AT + row, torch.sum(words, 1), words.shape[0] * WORD)
            at = position + COLUMNS_AT + row // ROWS * COLUMNS
            for found in _columns(words):
                sums.add(owner, at, found, found.numel() * WORD)
                at += found.numel()
        if left:
            if whole:
                rest = tensor.as_strided((left,), (1,), tensor.storage_offset() + rows * width)
            else:
                rest = tensor.new_empty(left)
                copy_range(tensor, rows * width, rest)
            self._batch(tensor.dtype).add(owner, position + REST_AT, rest, left * tensor.element_size())
        return size

    def end(self) -> None:
        """Mix what is left and release all tensors, because their owner may change them."""
        for batch in self.batches.values():
            batch.mix()
        self._scratch = None

    def _batch(self, kind: torch.dtype) -> Batch:
        batch = self.batches.get(kind)
        if batch is None:
            batch = self.batches[kind] = Batch(kind, self._device)
        return batch


def _columns(words: torch.Tensor) -> List[torch.Tensor]:
    blocks, left = divmod(words.shape[0], ROWS)
    if not blocks or (blocks == 1 and not left):
        return [torch.sum(words, 0)]
    whole = words.narrow(0, 0, blocks * ROWS).view(blocks, ROWS, COLUMNS)
    found = [torch.sum(whole, 1).view(-1)]
    return [*found, torch.sum(words.narrow(0, blocks * ROWS, left), 0)] if left else found


class Batch:
    """Pieces of tensors, all of one dtype, that wait to be mixed together."""

    def __init__(self, kind: torch.dtype, device: torch.device) -> None:
        self._pad = torch.zeros(WORD, dtype=kind, device=device)
        self._most_words = BATCH_WORDS if device.type == "cpu" else GPU_BATCH_WORDS
        self._pieces: List[torch.Tensor] = []
        self._starts: List[int] = []
        self._ends: List[int] = []
        self._jumps: List[int] = []  # the distance from the previous piece's last position to this piece's first
        self._last = self._words = 0
        self.owners: List[int] = []  # the owner of each piece that was added
        self.mixed: List[torch.Tensor] = []  # the two sums of each mixed piece, in the same order

    def add(self, owner: int, position: int, piece: torch.Tensor, size: int) -> None:
        """Add a piece of ``size`` bytes whose first word has this position. Mix when there are enough words."""
        self._pieces.append(piece)
        words, over = divmod(size, WORD)
        if over:
            words += 1
            self._pieces.append(self._pad.narrow(0, 0, (WORD - over) // piece.element_size()))
        self.owners.append(owner)
        self._starts.append(self._words)
        self._jumps.append(position - self._last)
        self._last = position + words - 1
        self._words += words
        self._ends.append(self._words - 1)
        if self._words >= self._most_words:
            self.mix()

    def mix(self) -> None:
        """Add, for each piece, the sum of its mixed words, and that sum weighted by position."""
        # The xor of a word with its own shifted bits makes the mixer nonlinear. With additions instead, two words that
        # change by the same amount up and down would cancel out.
        if not self._words:
            return
        words = torch.cat(self._pieces).view(torch.int64)
        columns = array.array("q", self._starts + self._ends + self._jumps)
        table = torch.frombuffer(columns, dtype=torch.int64).view(3, -1).to(words.device, non_blocking=True)
        starts, ends, jumps = table.unbind()
        places = torch.full_like(words, STEP).index_copy_(0, starts, jumps * STEP)
        places = torch.cumsum(places, 0, out=places)
        words ^= places
        shifted = words >> 32
        words ^= shifted
        words *= FACTOR
        words ^= torch.bitwise_right_shift(words, 29, out=shifted)
        places *= words
        plain = torch.cumsum(words, 0, out=shifted).index_select(0, ends)
        weighted = torch.cumsum(places, 0, out=words).index_select(0, ends)
        sums = torch.stack((plain, weighted), 1)
        sums.narrow(0, 1, len(sums) - 1).sub_(sums.narrow(0, 0, len(sums) - 1).clone())
        self.mixed.append(sums)
        self._pieces, self._starts, self._ends, self._jumps = [], [], [], []
        self._last = self._words = 0


WORD = 8
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Dtypes that every torch version can copy and concatenate. The others are read as integers of the same size.
PLAIN = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8))
USUAL = frozenset((torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)))
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
SPARSE = {  # by layout: the methods that return the parts
    torch.sparse_coo: ("_indices", "_values"), torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS,
}  # fmt: skip


def plain_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the plain tensors whose elements, in logical order, are this one's contents; empty if they are unknown."""
    kind = type(tensor)
    if kind in USUAL and tensor.dtype in PLAIN and tensor.layout is torch.strided and not tensor.is_meta:
        return () if tensor.is_nested else (tensor.resolve_neg() if tensor.is_neg() else tensor,)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # A wrapper class may name its inner tensors. A DTensor's are a shard, or not there yet.
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None or kind.__module__.startswith("torch.distributed"):
            return ()
        found = [plain_parts(getattr(tensor, name)) for name in flatten()[0]]
        return [part for parts in found for part in parts] if all(found) else ()
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():  # equal ones can have different entries
            return ()
        return [_of_known_dtype(getattr(tensor, name)()) for name in SPARSE.get(tensor.layout, ())]
    is_lazy = isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)  # it has no shape yet
    is_unknown = tensor.is_meta or tensor.is_quantized or tensor.is_nested or is_lazy
    return () if is_unknown else (_of_known_dtype(tensor),)


def _of_known_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bits in a dtype that every torch version can copy and concatenate."""
    if tensor.dtype in PLAIN:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    size = tensor.element_size()
    return torch.view_as_real(tensor) if size > WORD else tensor.view(INTEGERS[size])


def in_order(tensor: torch.Tensor) -> bool:
    if not tensor.is_contiguous() or tensor.is_neg():
        return False
    return bool(tensor.data_ptr() % WORD == 0 and tensor.storage_offset() * tensor.element_size() % WORD == 0)


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
