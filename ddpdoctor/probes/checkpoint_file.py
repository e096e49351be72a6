"""Reads one checkpoint file of any format: its damage, its contents by name, its values."""

from __future__ import annotations

import mmap
import pickle
import warnings
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import serialization

from ddpdoctor.model import saved
from ddpdoctor.model.errors import typed_line
from ddpdoctor.model.words import grouped
from ddpdoctor.probes import checkpoint_formats as formats
from ddpdoctor.recorder.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

HEAD_BYTES = 512
TAIL_BYTES = 4096
END_SIGNATURE = b"PK\x05\x06"  # signature of the record that ends a zip archive
END_BYTES = 22  # The least size of that record. A file that ends within it is truncated.
# The usual files that are found where a checkpoint should be, by how they begin.
_BEGINNINGS = (
    (b"version https://git-lfs", "a pointer of git-lfs: the file itself was not fetched (git lfs pull)"),
    (b"<!doctype html", "an HTML page, as a server sends where a download failed"),
    (b"<html", "an HTML page, as a server sends where a download failed"),
    (b"<?xml", "XML, as a storage server sends where a download failed"),
    (b"\x1f\x8b", "compressed by gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"),
    (b"\x89hdf", "an HDF5 file, as Keras writes"),
    (b"\x93numpy", "an array of NumPy"),
    (b"gguf", "a GGUF file, as llama.cpp reads"),
)
MOST_DEPTH = 4  # How deep to look for parts. Trainers put them one or two levels down.
CPU_STATE_BYTES = 5056
CUDA_STATE_BYTES = 16  # sizes of the uint8 tensors that ``torch.get_rng_state`` and ``torch.cuda.get_rng_state`` return
RANDOM_WORDS = ("rng", "random_state", "generator_state")
PROGRESS_WORDS = ("epoch", "step", "iter", "global_step", "iteration", "num_updates")
# Our choice: elements checked at once. Temporary tensors stay small, and a 30 GB file is not loaded as a whole.
CHUNK = 2**22
# Our choice: the most elements of a tensor larger than its storage. Damaged bytes can announce any number.
MOST_REPEATED = 2**24
# Dtypes that have NaN and that torch can check on a CPU.
WITH_FRACTIONS = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What to read beyond the index. Each of these reads the whole file."""

    whole: bool = True  # verify checksums, and check values
    digests: bool = False


def read_file(path: Path, extent: Extent) -> saved.FileSeen:
    """Read a file. Raises ``OSError`` if it cannot be opened."""
    size, form = path.stat().st_size, saved.Form.FOREIGN
    seen = saved.FileSeen(path=str(path), size_bytes=size, form=form, state=saved.ReadState.EMPTY)
    if size == 0:
        return seen
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        if head.startswith(formats.LOCAL_SIGNATURE):
            return _read_zip(replace(seen, form=saved.Form.ZIP), file, extent)
        is_safe = head[8:9] == b"{" and 2 <= formats.HEADER_LENGTH.unpack_from(head)[0] <= formats.MOST_HEADER_BYTES
        form = saved.Form.SAFETENSORS if is_safe else saved.Form.LEGACY
        try:
            index = (formats.read_safetensors if is_safe else formats.read_legacy)(file, seen.size_bytes)
        except formats.Unreadable as error:
            # Damaged or truncated: without an index we cannot know which.
            return replace(seen, form=form, state=saved.ReadState.UNREADABLE, detail=str(error))
    if index is None:
        lowered = head.lstrip().lower() if head[:1].isspace() else head.lower()
        other = (
            f"it begins with {head[:8]!r}, which is neither a zip archive nor an old format of torch.save nor "
            "safetensors"
            if any(head)
            else "only zeros at its beginning, as after a host crash before the data reached the disk"
        )
        detail = next((what for beginning, what in _BEGINNINGS if lowered.startswith(beginning)), other)
        return replace(seen, state=saved.ReadState.FOREIGN, detail=detail)
    if is_safe:
        tensors = _describe_all(index.root.items())
        weights = (saved.Weights(where="", tensors=tensors),) if tensors else ()
        contents = saved.Contents(tensors=tensors, weights=weights, parts=(saved.StatePart.MODEL,) if weights else ())
    else:
        contents = describe(index)
    state = saved.ReadState.WHOLE if index.is_whole else saved.ReadState.CUT
    seen = replace(
        seen, form=form, state=state, checksums=saved.Checksums.NONE, lost=_lost(index), contents=contents,
        refused=index.names,
    )  # fmt: skip
    return _with_values(seen, index, extent)


def _lost(index: formats.FileIndex) -> tuple[str, ...]:
    return tuple(name for name, ref in formats.walk_tensors(index.root) if ref.storage.key not in index.starts)


def _read_zip(seen: saved.FileSeen, file: BinaryIO, extent: Extent) -> saved.FileSeen:
    try:
        index = formats.read_archive(file, checksums=extent.whole)
    except zipfile.BadZipFile:
        return _read_cut_zip(seen, file)
    if extent.whole:
        checksums = saved.Checksums.CHECKED if index.has_checksums else saved.Checksums.NOT_WRITTEN
        seen = replace(seen, checksums=checksums)
    by_record = grouped((f"data/{ref.storage.key}", name) for name, ref in formats.walk_tensors(index.root))
    damaged = tuple(saved.Damage(record=name, tensors=tuple(by_record.get(name, ()))) for name in index.damaged)
    if index.problem:
        state = saved.ReadState.UNREADABLE if damaged else saved.ReadState.FOREIGN
        return replace(seen, state=state, detail=index.problem, damaged=damaged)
    refused, refusal = ((), "") if damaged else try_load(Path(seen.path), named=index.names)
    seen = replace(seen, damaged=damaged, contents=describe(index), refused=refused, refusal=refusal)
    return _with_values(replace(seen, state=saved.ReadState.WHOLE), index, extent)


def _read_cut_zip(seen: saved.FileSeen, file: BinaryIO) -> saved.FileSeen:
    # Where the data ends. Zeros after it were never written: the host went down, or the disk was full. Fewer than
    # TAIL_BYTES zeros may be data and count as such.
    end = size = seen.size_bytes
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        block = file.read(end - start).rstrip(b"\0")
        if block:
            end = start + len(block)
            break
        end = start
    end = end if size - end >= TAIL_BYTES else size
    index = formats.read_rest(file, end)
    # Whether the end of a zip archive is there. If so, the file is damaged and not truncated.
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    has_end = 0 <= tail.rfind(END_SIGNATURE) <= len(tail) - END_BYTES
    zeros = "" if end == size else f"its last {size - end} bytes are zeros"
    if has_end:
        seen = replace(seen, state=saved.ReadState.UNREADABLE, detail="the directory of its records is damaged")
    else:
        seen = replace(seen, state=saved.ReadState.CUT, detail=zeros)
    return seen if index is None else replace(seen, lost=_lost(index), contents=describe(index))


def _with_values(seen: saved.FileSeen, index: formats.FileIndex, extent: Extent) -> saved.FileSeen:
    """Add what the values of a whole file show: odd ones, and dtype, shape and fingerprint of each tensor."""
    if seen.state is not saved.ReadState.WHOLE:
        return seen
    digests: dict[str, str] | None = None
    tensors, starts = tuple(formats.walk_tensors(index.root)), index.starts
    with mapped(Path(seen.path)) as buffer:
        values, unseen = check_values(buffer, tensors, starts) if extent.whole else (None, ())
        if extent.digests:
            digests = {
                name: f"{ref.dtype} {list(ref.shape)} {fingerprints([tensor]).hex()}"
                for name, ref in tensors
                if (tensor := open_tensor(buffer, ref, starts)) is not None
            }
    return replace(seen, values=values, unseen=unseen, digests=digests)


def try_load(path: Path, *, named: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return for which of the functions and classes ``named`` in it torch refuses an archive, or another error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        ask = getattr(serialization, "get_unsafe_globals_in_checkpoint", None)  # since torch 2.6
        found: tuple[str, ...] = ()
        with suppress(Exception):  # we have read the file already, and torch's list is only a refinement
            found = tuple(ask(path)) if ask is not None else ()
        return found or named, "" if named else typed_line(error)
    except NotImplementedError:
        return (), ""  # the meta device has no quantized or nested tensors, which says nothing about the file
    except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
        return (), typed_line(error)
    return (), ""


def describe(index: formats.FileIndex) -> saved.Contents:
    root = index.root
    found = list(_walk(root, "", 0))
    parts = {part for _, value, key in found if (part := _part_of(key, value)) is not None}
    weights = []
    for path, value, _ in found:
        if _is_weights(value):
            own = ((name, ref) for name, ref in value.items() if isinstance(ref, formats.TensorRef))
            weights.append(saved.Weights(where=path, tensors=_describe_all(own)))
        elif _is_module(value):
            weights.append(saved.Weights(where=path, tensors=_describe_all(_state_of(value, ""))))
    if not weights and isinstance(root, formats.Opaque):
        # Such as a torch.jit script.
        weights.append(saved.Weights(where="", tensors=_describe_all(formats.walk_tensors(root))))
    if weights:
        parts.add(saved.StatePart.MODEL)
    return saved.Contents(
        tensors=_describe_all(formats.walk_tensors(root)), weights=tuple(weights), globals=index.names,
        parts=tuple(part for part in saved.StatePart if part in parts),
        empty_optimizer=any(_is_optimizer(value) and not value["state"] for _, value, _ in found),
    )  # fmt: skip


def _describe_all(tensors: Iterable[tuple[str, formats.TensorRef]]) -> tuple[saved.TensorIn, ...]:
    return tuple(saved.TensorIn(name=name, shape=ref.shape, dtype=ref.dtype) for name, ref in tensors)


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and last key of everything that may be a part, but not what is inside a part."""
    yield path, value, path.rpartition(".")[2]
    if depth == MOST_DEPTH or _is_weights(value) or _is_module(value) or _is_optimizer(value):
        return
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items += value.items()
    elif isinstance(value, list | tuple):
        items += enumerate(value)
    elif isinstance(value, formats.Opaque) and isinstance(value.state, dict):
        items += value.state.items()
    for key, child in items:
        yield from _walk(child, f"{path}.{key}" if path else str(key), depth + 1)


def _part_of(key: str, value: Any) -> saved.StatePart | None:
    if _is_optimizer(value):
        return saved.StatePart.OPTIMIZER
    if isinstance(value, dict):
        return _part_of_dict(value)
    if _is_random(key, value):
        return saved.StatePart.RANDOM
    if type(value) is int and key.lower().rstrip("s") in PROGRESS_WORDS:
        return saved.StatePart.PROGRESS
    return None


def _part_of_dict(value: dict[Any, Any]) -> saved.StatePart | None:
    if {"scale", "growth_factor", "_growth_tracker"} <= value.keys():
        return saved.StatePart.SCALER
    if "last_epoch" in value and ({"_step_count", "base_lrs", "_last_lr"} & value.keys()):
        return saved.StatePart.SCHEDULER
    return None


def _is_optimizer(value: Any) -> bool:
    held = value if isinstance(value, dict) else {}
    return isinstance(held.get("param_groups"), list) and isinstance(held.get("state"), dict)


def _is_random(key: str, value: Any) -> bool:
    if isinstance(value, formats.TensorRef):
        is_state = value.dtype == "uint8" and value.shape in {(CPU_STATE_BYTES,), (CUDA_STATE_BYTES,)}
        return is_state or any(word in key.lower() for word in RANDOM_WORDS)
    return isinstance(value, list | tuple | formats.Opaque) and any(word in key.lower() for word in RANDOM_WORDS)


def _is_weights(value: Any) -> bool:
    """Return whether a dict is a model's state dict: string keys, and tensors that are not random state as values."""
    # Half of the values must be tensors, because layers may add others (``_extra_state``). A dict that holds another
    # dict of tensors was put together by a script.
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        return False
    inner = (part for held in value.values() if isinstance(held, dict) for part in held.values())
    if any(isinstance(part, formats.TensorRef) for part in inner):
        return False
    tensors = [key for key, part in value.items() if isinstance(part, formats.TensorRef) and not _is_random(key, part)]
    return 2 * len(tensors) >= len(value) and _part_of_dict(value) is None


def _is_module(value: Any) -> bool:
    return isinstance(value, formats.Opaque) and isinstance(value.state, dict) and value.state.keys() >= formats.LAYERS


def _state_of(module: formats.Opaque, prefix: str) -> Iterator[tuple[str, formats.TensorRef]]:
    """Yield what a pickled module's state dict would hold. Other tensors, such as an LSTM's views, are left out."""
    state = module.state
    passing = state.get("_non_persistent_buffers_set") or ()
    for name, tensor in (*state["_parameters"].items(), *state["_buffers"].items()):
        if isinstance(tensor, formats.TensorRef) and name not in passing:
            yield f"{prefix}{name}", tensor
    for name, layer in state["_modules"].items():
        if _is_module(layer):
            yield from _state_of(layer, f"{prefix}{name}.")


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file with private pages. torch wants a writable buffer, but nothing is written to it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as bytes_of_file:
        yield bytes_of_file


def check_values(
    buffer: mmap.mmap, tensors: Iterable[tuple[str, formats.TensorRef]], starts: Mapping[str, int]
) -> tuple[tuple[saved.OddValues, ...], tuple[str, ...]]:
    """Return the tensors with values that are not finite, and the names of those that could not be checked."""
    found, unseen = [], []
    for name, ref in tensors:
        if ref.dtype not in WITH_FRACTIONS or 0 in ref.shape:
            continue
        tensor = open_tensor(buffer, ref, starts)
        if tensor is None:
            unseen.append(name)
            continue
        # One pass is enough for most tensors, because all of their values are finite.
        chunks = list(_chunks(tensor))
        if all(bool(torch.isfinite(chunk).all()) for chunk in chunks):
            continue
        nan = above = below = plain = 0
        for chunk in chunks:
            nan += int(torch.isnan(chunk).sum())
            above += int(torch.isposinf(chunk).sum())
            below += int(torch.isneginf(chunk).sum())
            plain += int((torch.isfinite(chunk) & (chunk != 0)).sum())
        found.append(saved.OddValues(name=name, of=tensor.numel(), nan=nan, above=above, below=below, plain=plain))
    return tuple(found), tuple(unseen)


def open_tensor(buffer: mmap.mmap, ref: formats.TensorRef, starts: Mapping[str, int]) -> Any | None:
    """Return a tensor as a view of the map, or None if its record is missing or too short."""
    start, dtype = starts.get(ref.storage.key, -1), getattr(torch, ref.dtype, None)
    if start < 0 or dtype is None:
        return None
    if ref.dtype.startswith("q"):  # quantized: torch reads a buffer only as plain integers
        dtype = getattr(torch, ref.dtype.removeprefix("q"))
    size = dtype.itemsize
    numel = prod(ref.shape)
    if numel > max(MOST_REPEATED, ref.storage.numel):
        return None
    if numel == 0:
        return torch.empty(0, dtype=dtype) if max(ref.shape) > MOST_REPEATED else torch.empty(ref.shape, dtype=dtype)
    count = 1 + ref.offset + sum((length - 1) * step for length, step in zip(ref.shape, ref.stride, strict=True))
    if count * size > max(ref.storage.size_bytes, 0) or start + count * size > len(buffer):
        return None
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start)
    return flat.as_strided(ref.shape, ref.stride, ref.offset)


def _chunks(tensor: Any) -> Iterator[Any]:
    """Yield the values in pieces that torch can compute with on a CPU, complex values as pairs of real ones."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    for piece in tensor.reshape(-1).split(CHUNK) if tensor.is_contiguous() else tensor.reshape(1, *tensor.shape):
        # torch cannot compare one-byte floats on a CPU.
        yield piece.float() if piece.element_size() == 1 else piece
