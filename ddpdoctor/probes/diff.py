"""`check-consistency --diff`: reads checkpoint files without running code in them, and compares them name by name."""

from __future__ import annotations

import pickle
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ddpdoctor.model.errors import UserError, typed_line
from ddpdoctor.model.saved import Apart, DiffFacts, Kind, SavedFile, Unequal, align_names
from ddpdoctor.model.words import group_alike
from ddpdoctor.recorder.fingerprint import FINGERPRINT_SIZE, UNKNOWN, fingerprints

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

RANK = re.compile(r"rank[-_.]?0*(\d+)", re.IGNORECASE)
CHUNK = 2**18  # Elements compared at once, a few MiB as float64. Our choice.
PREFIXES = ("module.", "_orig_mod.")  # what DDP and torch.compile put before each name
OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
# Names of buffers. A file does not say what is a buffer, and only batch and instance norm have telling names.
BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
RANDOM = re.compile(r"(^|[._])(rng|random|generator)", re.IGNORECASE)
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def compare_files(paths: Sequence[Path]) -> DiffFacts:
    """Compare two or more files, all against all. Raises ``UserError`` if one cannot be read or compared."""
    if len(paths) < 2:
        raise UserError("at least two files are needed", help="Give the files of two ranks or of two runs.")
    saved = [Saved() for _ in paths]
    for path, found in zip(paths, saved, strict=True):
        _list(found, _load(path), (), Kind.PARAMETER)
        if not found.tensors and not found.values:
            raise UserError(f"{path} has nothing to compare", help="Give files that torch.save has written.")
    # Remove the key around the whole model if only some files have it: {"model": ...} against a state dict. What such
    # a file holds besides the model (an optimizer, an epoch) has no counterpart in the others.
    prefixes = align_names([file.tensors for file in saved])
    saved = [file.below(prefix) if prefix else file for file, prefix in zip(saved, prefixes, strict=True)]
    tensors = list(dict.fromkeys(name for file in saved for name in file.tensors))
    values = list(dict.fromkeys(name for file in saved for name in file.values))
    if len(tensors) == sum(len(file.tensors) for file in saved) and tensors:
        first = [next(iter(file.tensors), "none") for file in saved]
        seen = ", ".join(f"{path.name}: {name}" for path, name in zip(paths, first, strict=True))
        raise UserError(
            f"the files have no tensor of the same name (the first of each: {seen})",
            help="Give files that were saved in the same way: all of a state_dict, or all of a dict with the same "
            "keys.",
        )
    digests = [_digests(file) for file in saved]
    unequal = [_unequal_tensor(name, saved, digests) for name in tensors]
    unequal += [_unequal_value(name, saved) for name in values]
    files = []
    for path, file in zip(paths, saved, strict=True):
        ranks = {int(number) for number in RANK.findall(path.name)} or {int(n) for n in RANK.findall(path.parent.name)}
        files.append(SavedFile(
            path=str(path), rank=ranks.pop() if len(ranks) == 1 else None, size_bytes=path.stat().st_size,
            tensors=len(file.tensors), values=len(file.values), stripped=tuple(sorted(file.stripped)),
            below=file.prefix, beside=file.beside,
        ))  # fmt: skip
    return DiffFacts(
        files=tuple(files), tensors=len(tensors),
        values=len(values), unequal=tuple(difference for difference in unequal if difference is not None),
        incomparable=tuple(name for name in tensors if any(digest.get(name) == "" for digest in digests)),
    )  # fmt: skip


def _digests(saved: Saved) -> dict[str, str]:
    found = fingerprints([tensor for _, tensor in saved.tensors.values()])
    digests = {}
    for number, (name, (_, tensor)) in enumerate(saved.tensors.items()):
        value = found[number * FINGERPRINT_SIZE : (number + 1) * FINGERPRINT_SIZE]
        digests[name] = "" if value == UNKNOWN else f"{_dtype_and_shape(tensor)} {value.hex()}"
    return digests


def _dtype_and_shape(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _unequal_tensor(name: str, saved: Sequence[Saved], digests: Sequence[dict[str, str]]) -> Unequal | None:
    sides, absent = _sides([digest.get(name) for digest in digests])
    if any(digest.get(name) == "" for digest in digests) or (len(sides) == 1 and not absent):
        return None
    tensors = [saved[side[0]].tensors[name][1] for side in sides]
    files = [side[0] for side in sides]
    apart = [measure_apart(file, files[0], tensor, tensors[0]) for file, tensor in zip(files, tensors, strict=True)]
    return Unequal(
        kind=saved[sides[0][0]].tensors[name][0], name=name, sides=sides, absent_in=absent,
        seen=tuple(map(_dtype_and_shape, tensors)), apart=tuple(pair for pair in apart[1:] if pair is not None),
    )  # fmt: skip


def _unequal_value(name: str, saved: Sequence[Saved]) -> Unequal | None:
    """Return how a value differs. Skip it if other files hold a tensor there: the tensor's result covers it."""
    held = [file.values.get(name) for file in saved]
    sides, absent = _sides([None if value is None else value[1] for value in held])
    if (len(sides) == 1 and not absent) or any(name in file.tensors for file in saved):
        return None
    kinds: list[Kind] = [value[0] for value in held if value is not None]
    seen = tuple(saved[side[0]].values[name][1][:60] for side in sides)
    return Unequal(kind=kinds[0], name=name, sides=sides, seen=seen, absent_in=absent)


def _sides(held: Sequence[str | None]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return groups of files that hold the same, the largest first, and the files that hold nothing."""
    sides = group_alike({number: text for number, text in enumerate(held) if text is not None})
    return tuple(files for _, files in sides), tuple(number for number, text in enumerate(held) if text is None)


def measure_apart(file: int, against: int, ours: Any, theirs: Any) -> Apart | None:
    """Return how far ``ours``, of one file, is from ``theirs``, or None if they cannot be subtracted."""
    if any(tensor.layout is not torch.strided or tensor.is_quantized for tensor in (ours, theirs)):
        return None
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.numel() == 0:
        return None
    differing = not_finite = 0
    first = -1
    largest: float | None = None
    relative: float | None = None
    for at, left, right in _chunks(ours.detach(), theirs.detach()):
        places = (_bits(left) != _bits(right)).any(1).nonzero().view(-1)
        if not len(places):
            continue
        first = at + int(places[0]) if first < 0 else first
        differing += len(places)
        a, b = _subtractable(left.contiguous()[places]), _subtractable(right.contiguous()[places])
        finite = torch.isfinite(a) & torch.isfinite(b)
        not_finite += int((~finite).sum())
        if not finite.any():
            continue
        a, b = a[finite], b[finite]
        off, size = (a - b).abs(), torch.maximum(a.abs(), b.abs())
        largest = max(largest or 0.0, float(off.max()))
        # The size is 0 only for +0 and -0.
        relative = max(relative or 0.0, float((off / size.clamp_min(torch.finfo(torch.float64).tiny)).max()))
    return Apart(
        file=file, against=against, differing=differing, of=ours.numel(),
        first=tuple(int(i) for i in torch.unravel_index(torch.tensor(first), ours.shape)), largest=largest,
        relative=relative, not_finite=not_finite,
    )  # fmt: skip


def _chunks(ours: Any, theirs: Any) -> Iterator[tuple[int, Any, Any]]:
    if ours.is_contiguous() and theirs.is_contiguous():
        pairs = zip(ours.reshape(-1).split(CHUNK), theirs.reshape(-1).split(CHUNK), strict=True)
    else:
        pairs = zip(ours.reshape(ours.shape[0], -1), theirs.reshape(theirs.shape[0], -1), strict=True)
    at = 0
    for a, b in pairs:
        yield at, a.reshape(-1), b.reshape(-1)
        at += a.numel()


def _bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.uint8).view(tensor.numel(), -1)


def _subtractable(tensor: Any) -> Any:
    """Return the tensor in a dtype that can be subtracted. Integers beyond 2**53 are rounded."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds, by name, in file order."""

    tensors: dict[str, tuple[Kind, Any]] = field(default_factory=dict)
    values: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    stripped: set[str] = field(default_factory=set)
    prefix: str = ""  # The key around the whole model. It was removed because other files lack it.
    beside: int = 0  # The number of tensors outside of that key. They are left out.

    def below(self, prefix: str) -> Saved:
        tensors = {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}
        values = {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}
        return Saved(tensors, values, self.stripped, prefix, beside=len(self.tensors) - len(tensors))


def _load(path: Path) -> Any:
    if path.is_dir():
        advice = "Checkpoints in folders: ddpdoctor check-checkpoint."
        raise UserError(f"{path} is a folder, but only files are compared", help=advice)
    check = f"ddpdoctor check-checkpoint {path} shows what is wrong with it."
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        # With weights_only, because a pickle can run any code. Memory-mapped to save memory.
        with suppress(RuntimeError):  # the format before torch 1.6 cannot be mapped; damage raises again below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        # For a truncated file, torch maps more than there is and gets EINVAL.
        hint = check if path.is_file() else ""
        raise UserError(f"{path} cannot be read: {error.strerror or error}", help=hint) from error
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f": it names {named[1]}" if named else f" ({typed_line(error)})"
        raise UserError(
            f"{path} holds more than tensors and plain values{what}, which torch.load(weights_only=True) refuses "
            "because loading it could run any code. None of it was run",
            help="Save the state_dict() of model and optimizer, and numbers, not objects, NumPy arrays or whole "
            "modules.",
        ) from error
    except Exception as error:
        raise UserError(f"{path} is not a checkpoint, or is damaged: {typed_line(error)}", help=check) from error


def _safetensors(path: Path) -> Mapping[str, Any]:
    from ddpdoctor.probes.checkpoint_file import mapped, open_tensor
    from ddpdoctor.probes.checkpoint_formats import read_safetensors

    with path.open("rb") as file:
        index = read_safetensors(file, path.stat().st_size)
    if missing := [name for name in index.root if name not in index.starts]:
        raise ValueError(f"it ends before the data of {missing[0]}")
    with mapped(path) as buffer:
        # Clones, because a tensor on the map would keep it from being closed.
        opened = {name: open_tensor(buffer, ref, index.starts) for name, ref in index.root.items()}
        found = {name: tensor.clone() for name, tensor in opened.items() if tensor is not None}
        del opened
        return found


def _list(found: Saved, value: Any, path: tuple[str, ...], kind: Kind) -> None:
    """Add everything in ``value`` to ``found``, except objects that are not plain containers."""
    name = ".".join(path)
    random = Kind.RANDOM if RANDOM.search(name) else None
    if isinstance(value, torch.Tensor):
        is_buffer = kind is Kind.PARAMETER and name.rpartition(".")[2] in BUFFERS
        found.tensors[name] = (random or (Kind.BUFFER if is_buffer else kind), value)
    elif isinstance(value, dict):
        inner = Kind.STATE if value.keys() >= OPTIMIZER_KEYS else kind
        for key, child in _child_items(found, value):
            _list(found, child, (*path, key), inner)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for number, child in enumerate(value):
            _list(found, child, (*path, str(number)), kind)
    elif isinstance(value, (*PLAIN, torch.Size, torch.dtype, torch.device)):
        is_setting = kind is Kind.STATE or any("sched" in part for part in name.lower().split(".")[:-1])
        found.values[name] = (random or (Kind.SETTING if is_setting else Kind.VALUE), repr(value))


def _child_items(found: Saved, value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, without the prefixes that all tensor keys share."""
    keys, prefix = [key for key, child in value.items() if hasattr(child, "shape")], ""
    while keys and all(isinstance(key, str) for key in keys):
        more = next((more for more in PREFIXES if all(key.startswith(prefix + more) for key in keys)), "")
        if not more:
            break
        prefix += more
    if prefix:
        found.stripped.add(prefix)
    for key, child in value.items():
        plain = str(key).removeprefix(prefix)
        if "._orig_mod." in plain:  # a part of the model was compiled
            found.stripped.add("_orig_mod.")
        yield plain.replace("._orig_mod.", "."), child
