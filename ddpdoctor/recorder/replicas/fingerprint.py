"""A checksum of tensors, 128 bits each: equal for equal values, whatever their layout in memory and their device.

A tensor's elements, in logical order, are read as words of 64 bits, the last padded with zeros. In blocks of 125 rows
of 509 words the sums of the rows and of the columns stand for the words; what is left over, and a small tensor, stands
for itself. Each of these goes, with its position, through a mixer that is not linear. The sum of what comes out is one
half of the fingerprint, the sum weighted by position the other. All are integers modulo 2**64: neither threads nor
devices change a bit.

Why like this: torch has no hash. A plain sum misses every permutation, and modulo 2**64 an even number of changes of a
word's highest bit, the sign of a float64. The sums of rows and columns let pass only such highest bits that are even in
number in each row and each column of a block, as at the corners of a rectangle. Rows and columns of a block, the last
one included, have odd lengths, so that no change of whole rows, columns or runs of a tensor falls like that. Sums run
at the speed of memory, and what is then to be mixed is one percent.

Bits are compared: -0.0 differs from 0.0, and so do NaNs of other payloads. Nothing of the caller's is changed: no
graph, no version counter, no random state, and no mode of the caller's sees the work.
"""

from __future__ import annotations

import array
import struct
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from ..capture import is_capturing
from ..storage.fingerprint_layout import ABSENT, FINGERPRINT_SIZE, UNKNOWN
from .tensor_words import WORD, copy_range, in_order, plain_parts

__all__ = ["ABSENT", "FINGERPRINT_SIZE", "UNKNOWN", "Fingerprints", "fingerprints"]

COLUMNS = 509
"""Words in a row. Part of the checksum, as is all that is written here in capitals but how much is done at once."""
ROWS = 125
"""Rows of a block: half a MiB, which a core's cache holds between the two sums; the last block has fewer. Both odd."""
SMALL_WORDS = 4 * COLUMNS
"""Up to here words are mixed themselves: two sums would take longer."""
COLUMNS_AT, ROWS_AT, REST_AT, PART_AT = 1, 2**40, 2**41, 2**48
"""Positions from which are counted: sums of columns, and small tensors; sums of rows; what is left; a next part."""

STEP = -0x61C8864680B583EB
FACTOR = -0x00AE502812AA7333
LENGTH = 0x2545F4914F6CDD1D
"""Odd, with bits like random ones: 2**64 over the golden ratio, murmur3's, and xorshift's. Signed, as torch's are."""

BATCH_WORDS, GPU_BATCH_WORDS = 2**14, 2**20
"""So many words are mixed at once: on a CPU 128 KiB, and three times that beside it. On an accelerator a batch takes 20
launches, whatever its size. Ours."""
CHUNK_BLOCKS, WHOLE_BLOCKS = 32, 1024
"""Blocks that one call adds up on an accelerator, to which half a MiB is nothing: where they are copied first, and
where they are read in place. Their sums fit into a batch. Ours."""


def fingerprints(tensors: Sequence[Optional[torch.Tensor]]) -> bytes:
    """Return 16 bytes a tensor: ABSENT for None, UNKNOWN where the contents cannot be read. Never raises for a tensor.

    UNKNOWN are tensors without data (meta, fake, not initialised yet), shards (DTensor), quantised and nested ones,
    sparse ones whose entries are still to be added up, those of classes that hide their data, all while torch.compile
    traces, and those on a GPU while a graph is captured. Shape and dtype are no part of it, the size in bytes is.
    """
    return Fingerprints(tensors).value()


class Fingerprints:
    """Prints of tensors as they are when this is made, which waits for no GPU; ``value`` does, for each once."""

    def __init__(self, tensors: Sequence[Optional[torch.Tensor]]) -> None:
        self._parts: List[Any] = []
        if torch.compiler.is_compiling():
            self._parts = [_unknown(tensor) for tensor in tensors]
            return
        # No graph is left, and no mode of the caller's sees the work. Dynamo must see these by name: a class of ours
        # around them left gradients off after a compiled function.
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            try:
                self._parts = [_Together(tensors)]
            except Exception:  # noqa: BLE001  # one bad tensor must not cost the others
                self._parts = [_alone(tensor) for tensor in tensors]

    def value(self) -> bytes:
        """Return 16 bytes a tensor."""
        return b"".join([part.value() for part in self._parts])


class _Known:
    """A fingerprint without words to be read."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def value(self) -> bytes:
        return self._value


def _unknown(tensor: Optional[torch.Tensor]) -> _Known:
    return _Known(ABSENT if tensor is None else UNKNOWN)


def _alone(tensor: Optional[torch.Tensor]) -> Any:
    try:
        return _Together([tensor])
    except Exception:  # noqa: BLE001  # a class of tensors that only looks like one, or no memory
        return _Known(UNKNOWN)


class _Together:
    """The fingerprints of several tensors."""

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
                # One more, so that no size is nothing.
                self._sizes[owner] += (reader.take(owner, i * PART_AT, part) + 1) * (2 * i + 1)
        for reader in self._readers.values():
            reader.end()

    def value(self) -> bytes:
        """Return them; where a device fails, that they are not known."""
        count = len(self._sizes)
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            try:
                sums = torch.tensor((self._sizes, self._sizes), dtype=torch.int64, device="cpu").t() * LENGTH
                for reader in self._readers.values():
                    reader.add_to(sums)
                found = struct.pack("<%dq" % (2 * count), *sums.reshape(-1).tolist())
            except Exception:  # noqa: BLE001  # the script hears of it by itself
                return UNKNOWN * count
        for owner, value in self._without:
            found = found[: owner * FINGERPRINT_SIZE] + value + found[(owner + 1) * FINGERPRINT_SIZE :]
        return found


class Reader:
    """Takes the words of tensors of one device. One transfer brings all results."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and is_capturing():
            raise RuntimeError("what is done now would become part of the graph")
        self._device = device
        on_cpu = device.type == "cpu"
        self._chunk_rows = ROWS if on_cpu else ROWS * CHUNK_BLOCKS
        self._whole_rows = ROWS if on_cpu else ROWS * WHOLE_BLOCKS
        self._scratch: Optional[torch.Tensor] = None
        self._batches: Dict[torch.dtype, Batch] = {}

    def take(self, owner: int, position: int, tensor: torch.Tensor) -> int:
        """Take all words of a tensor; return its size in bytes."""
        size: int = tensor.numel() * tensor.element_size()
        if size > SMALL_WORDS * WORD:
            self._take_blocks(owner, position, tensor)
        elif size:
            piece = tensor if tensor.dim() == 1 else tensor.reshape(-1)
            self._batch(tensor.dtype).add(owner, position + COLUMNS_AT, piece, size)
        return size

    def end(self) -> None:
        """Hold no tensor any more: its owner may change it."""
        for batch in self._batches.values():
            batch.mix()
        self._scratch = None

    def add_to(self, sums: torch.Tensor) -> None:
        """Add to each owner's two sums what was taken."""
        mixed = [one for batch in self._batches.values() for one in batch.mixed]
        if mixed:
            owners = [owner for batch in self._batches.values() for owner in batch.owners]
            sums.index_add_(0, torch.tensor(owners, dtype=torch.int64, device="cpu"), torch.cat(mixed).cpu())

    def _take_blocks(self, owner: int, position: int, tensor: torch.Tensor) -> None:
        sums = self._batch(torch.int64)
        width = COLUMNS * WORD // tensor.element_size()
        rows, left = divmod(tensor.numel(), width)
        if rows % ROWS and rows % ROWS % 2 == 0:
            rows, left = rows - 1, left + width
        whole = in_order(tensor)
        step = self._whole_rows if whole else self._chunk_rows
        for row in range(0, rows, step):
            words = self._rows_of(tensor, row, min(step, rows - row), width, whole)
            # The rows first: so the caches are filled at the higher speed of the two.
            sums.add(owner, position + ROWS_AT + row, torch.sum(words, 1), words.shape[0] * WORD)
            at = position + COLUMNS_AT + row // ROWS * COLUMNS
            for found in _columns(words):
                sums.add(owner, at, found, found.numel() * WORD)
                at += found.numel()
        if left:
            rest = _rest_of(tensor, rows * width, left, whole)
            self._batch(tensor.dtype).add(owner, position + REST_AT, rest, left * tensor.element_size())

    def _rows_of(self, tensor: torch.Tensor, row: int, rows: int, width: int, whole: bool) -> torch.Tensor:
        """Return rows of words, read in place where that can be."""
        if whole:
            at = tensor.storage_offset() + row * width
            return tensor.as_strided((rows, width), (width, 1), at).view(torch.int64)
        if self._scratch is None:
            self._scratch = torch.empty(self._chunk_rows, COLUMNS, dtype=torch.int64, device=self._device)
        words = self._scratch[:rows]
        copy_range(tensor, row * width, words.view(tensor.dtype).view(-1))
        return words

    def _batch(self, kind: torch.dtype) -> Batch:
        batch = self._batches.get(kind)
        if batch is None:
            batch = self._batches[kind] = Batch(kind, self._device)
        return batch


def _columns(words: torch.Tensor) -> List[torch.Tensor]:
    """Add up each block's columns: of the whole blocks at once, then of what is left."""
    blocks, left = divmod(words.shape[0], ROWS)
    if not blocks or (blocks == 1 and not left):
        return [torch.sum(words, 0)]
    whole = words.narrow(0, 0, blocks * ROWS).view(blocks, ROWS, COLUMNS)
    found = [torch.sum(whole, 1).view(-1)]
    return [*found, torch.sum(words.narrow(0, blocks * ROWS, left), 0)] if left else found


def _rest_of(tensor: torch.Tensor, first: int, count: int, whole: bool) -> torch.Tensor:
    """Return the elements from the ``first`` on, read in place where that can be."""
    if whole:
        return tensor.as_strided((count,), (1,), tensor.storage_offset() + first)
    rest = tensor.new_empty(count)
    copy_range(tensor, first, rest)
    return rest


class Batch:
    """Pieces of tensors, all of one dtype, that wait to be mixed together."""

    def __init__(self, kind: torch.dtype, device: torch.device) -> None:
        self._pad = torch.zeros(WORD, dtype=kind, device=device)
        self._most_words = BATCH_WORDS if device.type == "cpu" else GPU_BATCH_WORDS
        self._pieces: List[torch.Tensor] = []
        self._starts: List[int] = []
        self._ends: List[int] = []
        self._jumps: List[int] = []
        """By how much a piece's first position is off the last one's last."""
        self._last = 0
        self._words = 0
        self.owners: List[int] = []
        """Of each piece that was added: whose it is."""
        self.mixed: List[torch.Tensor] = []
        """Of those that have been mixed, in the same order, the two sums."""

    def add(self, owner: int, position: int, piece: torch.Tensor, size: int) -> None:
        """Keep a piece of ``size`` bytes, whose first word has this position, until there are enough."""
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
        """Mix what has been added since the last time."""
        if not self._words:
            return
        words = torch.cat(self._pieces).view(torch.int64)
        columns = array.array("q", self._starts + self._ends + self._jumps)
        table = torch.frombuffer(columns, dtype=torch.int64).view(3, -1).to(words.device, non_blocking=True)
        self.mixed.append(_mixed(words, *table.unbind()))
        self._pieces, self._starts, self._ends, self._jumps = [], [], [], []
        self._last = self._words = 0


def _mixed(words: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, jumps: torch.Tensor) -> torch.Tensor:
    """Return, for each piece, the sum of its words, mixed, and that of those by position. Overwrites ``words``.

    The xor of a word with itself is what is not linear: with additions instead, two words that change by as much up and
    down would cancel out.
    """
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
    pieces = sums.shape[0] - 1
    sums.narrow(0, 1, pieces).sub_(sums.narrow(0, 0, pieces).clone())
    return sums
