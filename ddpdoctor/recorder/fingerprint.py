"""A checksum of tensors, 128 bits each: equal for equal values, whatever their layout in memory and their device.

A tensor's elements, in logical order, are read as words of 64 bits, the last padded with zeros. In blocks of 128 rows
of 509 words the sums of the rows and of the columns stand for the words; what is left over, and a small tensor, stands
for itself. Each of these goes, with its position, through a mixer that is not linear, and two stages of the mixer are
summed to the two halves of the print. All are integers modulo 2**64: neither threads nor devices change a bit.

Why like this: torch has no hash. A plain sum misses every permutation, and modulo 2**64 an even number of changes of a
word's highest bit, the sign of a float64. The sums of rows and columns let pass only such highest bits that are even in
number in each row and each column of a block, as at the corners of a rectangle: with 509, which is prime and no width
of a matrix, no change of whole rows, columns or runs of a tensor falls like that. Sums run at the speed of memory, and
what is then to be mixed is one percent.

Bits are compared: -0.0 differs from 0.0, and so do NaNs of other payloads. Nothing of the caller's is changed: no
graph, no version counter, no random state, and no mode of the caller's sees the work.
"""

import struct
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from .print_wire import ABSENT, UNTOLD
from .tensor_words import WORD, copy_range, flat, in_order, plain_parts

COLUMNS = 509
"""Words in a row. Part of the checksum, as is all that is written here in capitals but BATCH_WORDS and CHUNK_BLOCKS."""
ROWS = 128
"""Rows of a block: half a MiB, which a core's cache holds between the two sums."""
SMALL_WORDS = 4 * COLUMNS
"""Up to here words are mixed themselves: two sums would take longer."""
ROWS_AT, REST_AT, PART_AT = 2**40, 2**41, 2**48
"""Positions of the sums of rows and of the words behind them, where those of columns start at 0; of a further part."""

STEP = -0x61C8864680B583EB
FIRST = -0x00AE502812AA7333
SECOND = -0x3B314601E57A13AD
LENGTH = 0x2545F4914F6CDD1D
"""Odd, with bits like random ones: 2**64 over the golden ratio, murmur3's two, and xorshift's; signed, as torch's are."""
MASK = 2**64 - 1

BATCH_WORDS = 2**14
"""So many words are mixed at once: 128 KiB, and three times that beside it. Ours."""
CHUNK_BLOCKS = 32
"""Blocks that one call adds up on an accelerator, to which half a MiB is nothing. Ours."""


class Parts(NamedTuple):
    """What a tensor holds, as plain tensors on one device."""

    index: int
    """Of the tensor, among those asked for."""
    tensors: List[torch.Tensor]


def prints(tensors: Sequence[Optional[torch.Tensor]]) -> bytes:
    """Return 16 bytes a tensor: ABSENT for None, UNTOLD where the contents cannot be told. Never raises for a tensor.

    UNTOLD are tensors without data (meta, fake, not initialised yet), shards (DTensor), quantised and nested ones,
    sparse ones whose entries are still to be added up, those of classes that hide their data, all while torch.compile
    traces, and those on a GPU while a graph is captured. Shape and dtype are no part of it, the size in bytes is.
    """
    found = [ABSENT if tensor is None else UNTOLD for tensor in tensors]
    if torch.compiler.is_compiling():
        return b"".join(found)
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        for device, asked in _by_device(tensors).items():
            for parts, value in zip(asked, _digest_each(device, asked)):
                found[parts.index] = value
    return b"".join(found)


def _by_device(tensors: Sequence[Optional[torch.Tensor]]) -> Dict[torch.device, List[Parts]]:
    """Leave out what cannot be told."""
    found: Dict[torch.device, List[Parts]] = {}
    for index, tensor in enumerate(tensors):
        try:
            parts = None if tensor is None else plain_parts(tensor)
        except Exception:  # noqa: BLE001  # a class of tensors that only looks like one
            parts = None
        if parts and all(part.device == parts[0].device for part in parts):
            found.setdefault(parts[0].device, []).append(Parts(index, parts))
    return found


def _digest_each(device: torch.device, asked: List[Parts]) -> List[bytes]:
    """Where all together fail, each is tried alone: one bad tensor must not cost the others."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return [UNTOLD] * len(asked)
    try:
        return Digest(device).of(asked)
    except Exception:  # noqa: BLE001
        return [UNTOLD] if len(asked) == 1 else [_digest_each(device, [parts])[0] for parts in asked]


class Digest:
    """Collects the words of tensors of one device, and mixes them batch by batch. One transfer brings all results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks = 1 if device.type == "cpu" else CHUNK_BLOCKS
        self._scratch: Optional[torch.Tensor] = None
        self._pads: Dict[torch.dtype, torch.Tensor] = {}
        self._pieces: Dict[torch.dtype, List[torch.Tensor]] = {}
        self._segments: Dict[torch.dtype, List[Tuple[int, int, int]]] = {}
        """Of each piece: the tensor's index, the position of its first word, and its words."""
        self._words = 0
        self._owners: List[int] = []
        self._mixed: List[torch.Tensor] = []

    def of(self, asked: List[Parts]) -> List[bytes]:
        """Return the prints, in order."""
        totals: Dict[int, List[int]] = {}
        for index, tensors in asked:
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
            totals[index] = [sum(size * LENGTH * (2 * i + 1) for i, size in enumerate(sizes, 1)), 0]
            for i, tensor in enumerate(tensors):
                self._take(index, i * PART_AT, tensor)
        self._mix()
        first, second = torch.cat(self._mixed, 1).tolist() if self._mixed else ((), ())
        for index, a, b in zip(self._owners, first, second):
            totals[index][0] += a
            totals[index][1] += b
        return [_packed(*totals[parts.index]) for parts in asked]

    def _take(self, index: int, position: int, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        count = tensor.numel()
        if count * size <= SMALL_WORDS * WORD:
            if count:
                self._add(index, position, flat(tensor))
            return
        width = COLUMNS * WORD // size
        rows = count // width
        whole = in_order(tensor)
        step = ROWS * self._blocks
        for row in range(0, rows, step):
            self._sum(index, position, row, self._words_of(tensor, row, min(step, rows - row), whole))
        if rows * width < count:
            self._add(index, position + REST_AT, _rest_of(tensor, rows * width, whole))

    def _words_of(self, tensor: torch.Tensor, row: int, rows: int, whole: bool) -> torch.Tensor:
        """Return rows of words, read in place where that can be."""
        width = COLUMNS * WORD // tensor.element_size()
        if whole:
            at = tensor.storage_offset() + row * width
            return tensor.as_strided((rows, width), (width, 1), at).view(torch.int64)
        if self._scratch is None:
            self._scratch = torch.empty(ROWS * self._blocks, COLUMNS, dtype=torch.int64, device=self._device)
        words = self._scratch[:rows]
        copy_range(tensor, row * width, words.view(tensor.dtype).view(-1))
        return words

    def _sum(self, index: int, position: int, row: int, words: torch.Tensor) -> None:
        """Sum up the rows first: with that the caches are filled at the higher speed."""
        self._add(index, position + ROWS_AT + row, torch.sum(words, 1))
        blocks = len(words) // ROWS
        if blocks > 1:
            whole = words[: blocks * ROWS].view(blocks, ROWS, COLUMNS)
            self._add(index, position + row // ROWS * COLUMNS, torch.sum(whole, 1).view(-1))
            words = words[blocks * ROWS :]
            row += blocks * ROWS
        if len(words):
            self._add(index, position + row // ROWS * COLUMNS, torch.sum(words, 0))

    def _add(self, index: int, position: int, piece: torch.Tensor) -> None:
        """Keep a piece, of one dimension, until there are enough to be mixed."""
        kind = piece.dtype
        pieces = self._pieces.setdefault(kind, [])
        pieces.append(piece)
        size = piece.element_size()
        count = piece.numel()
        words = (count * size + WORD - 1) // WORD
        if words * WORD != count * size:
            pieces.append(self._pad(kind)[: words * WORD // size - count])
        self._segments.setdefault(kind, []).append((index, position, words))
        self._words += words
        if self._words >= BATCH_WORDS:
            self._mix()

    def _pad(self, kind: torch.dtype) -> torch.Tensor:
        if kind not in self._pads:
            self._pads[kind] = torch.zeros(WORD, dtype=kind, device=self._device)
        return self._pads[kind]

    def _mix(self) -> None:
        if not self._words:
            return
        words = torch.cat([torch.cat(pieces).view(torch.int64) for pieces in self._pieces.values()])
        segments = [segment for found in self._segments.values() for segment in found]
        self._owners += [index for index, _, _ in segments]
        self._mixed.append(_mixed(words, [(position, count) for _, position, count in segments]))
        self._pieces, self._segments, self._words = {}, {}, 0


def _mixed(words: torch.Tensor, segments: List[Tuple[int, int]]) -> torch.Tensor:
    """Return two sums a segment, of all its words mixed. ``words`` are overwritten.

    xor is what is not linear: with additions instead, two words that change by as much up and down would cancel out.
    """
    offsets, ends, at = [], [], 0
    for position, count in segments:
        offsets.append(position - at)
        at += count
        ends.append(at - 1)
    table = torch.tensor([offsets, [count for _, count in segments], ends], dtype=torch.int64, device="cpu")
    table = table.to(words.device, non_blocking=True)
    places = torch.arange(1, at + 1, dtype=torch.int64, device=words.device)
    places += torch.repeat_interleave(table[0], table[1], output_size=at)
    words.add_(places, alpha=STEP)
    shifted = places
    words ^= torch.bitwise_right_shift(words, 32, out=shifted)
    words *= FIRST
    words ^= torch.bitwise_right_shift(words, 29, out=shifted)
    first = torch.cumsum(words, 0, out=shifted)[table[2]]
    words *= SECOND
    words ^= torch.bitwise_right_shift(words, 32, out=shifted)
    second = torch.cumsum(words, 0, out=shifted)[table[2]]
    return torch.diff(torch.stack((first, second)), prepend=torch.zeros(2, 1, dtype=torch.int64, device=words.device))


def _rest_of(tensor: torch.Tensor, first: int, whole: bool) -> torch.Tensor:
    """Return the elements from the ``first`` on, read in place where that can be."""
    count = tensor.numel() - first
    if whole:
        return tensor.as_strided((count,), (1,), tensor.storage_offset() + first)
    rest = tensor.new_empty(count)
    copy_range(tensor, first, rest)
    return rest


def _packed(first: int, second: int) -> bytes:
    """Never what says that there is no print."""
    value = struct.pack("<QQ", first & MASK, second & MASK)
    return value if value not in {ABSENT, UNTOLD} else struct.pack("<QQ", 1, 1)
