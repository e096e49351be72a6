"""Reads a checkpoint file without running code in it, and lists what it holds by name."""

from __future__ import annotations

import pickle
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError, typed_line
from ddpdoctor.model.saved import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PREFIXES = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before each name."""
OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Names of buffers. A file does not say what is a buffer, and only batch and instance norm have telling names."""
RANDOM = re.compile(r"(^|[._])(rng|random|generator)", re.IGNORECASE)
PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds, by name, in file order."""

    tensors: dict[str, tuple[Kind, Any]] = field(default_factory=dict)
    values: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    stripped: set[str] = field(default_factory=set)
    prefix: str = ""
    """The key around the whole model. It was removed because other files lack it."""
    beside: int = 0
    """The number of tensors outside of that key. They are left out."""

    def below(self, prefix: str) -> Saved:
        """Return only what is below a key, with the key removed from the names."""
        tensors = {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}
        values = {name.removeprefix(prefix): one for name, one in self.values.items() if name.startswith(prefix)}
        beside = len(self.tensors) - len(tensors)
        return Saved(tensors, values, self.stripped, prefix, beside)


def read_saved(path: Path) -> Saved:
    """Return what a file holds. Raises ``UserError`` if it cannot be read."""
    found = Saved()
    _list(found, _load(path), (), Kind.PARAMETER)
    if not found.tensors and not found.values:
        raise UserError(f"{path} has nothing that can be compared", help="Give files that torch.save has written.")
    return found


def _load(path: Path) -> Any:
    if path.is_dir():
        raise UserError(
            f"{path} is a folder, but only files are compared",
            help="Checkpoints in folders: ddpdoctor check-checkpoint.",
        )
    check = f"ddpdoctor check-checkpoint {path} says what is wrong with it."
    try:
        return _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
    except OSError as error:
        # For a truncated file, torch maps more than there is and gets EINVAL.
        hint = check if path.is_file() else ""
        raise UserError(f"{path} cannot be read: {error.strerror or error}", help=hint) from error
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except Exception as error:
        raise UserError(
            f"{path} is not a checkpoint, or is damaged: {typed_line(error)}",
            help=check,
        ) from error


def _torch_file(path: Path) -> Any:
    """Read with ``weights_only``, because a pickle can run any code. Memory-map the file to save memory."""
    import torch

    with suppress(RuntimeError):  # the format before torch 1.6 cannot be mapped; damage raises again below
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)


def _safetensors(path: Path) -> Mapping[str, Any]:
    from ddpdoctor.probes.checkpoint.safetensors import read_safetensors
    from ddpdoctor.probes.checkpoint.values import mapped, open_tensor

    with path.open("rb") as file:
        listed = read_safetensors(file, path.stat().st_size)
    if missing := [name for name in listed.tensors if name not in listed.starts]:
        raise ValueError(f"it ends before the data of {missing[0]}")
    with mapped(path) as buffer:
        # Clones, because a tensor on the map would keep it from being closed.
        opened = {name: open_tensor(buffer, ref, listed.starts) for name, ref in listed.tensors.items()}
        found = {name: tensor.clone() for name, tensor in opened.items() if tensor is not None}
        del opened
        return found


def _refused(path: Path, error: Exception) -> UserError:
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f": it names {named[1]}" if named else f" ({typed_line(error)})"
    return UserError(
        f"{path} holds more than tensors and plain values{what}, which torch.load(weights_only=True) refuses, since "
        "loading it could run any code. Nothing of it was run",
        help="Save state_dict() of model and optimizer, and numbers; not objects, arrays of NumPy or whole modules.",
    )


def _list(found: Saved, value: Any, path: tuple[str, ...], kind: Kind) -> None:
    """Add all that ``value`` holds to ``found``. Objects of other classes than plain containers are left out."""
    import torch

    name = ".".join(path)
    if isinstance(value, torch.Tensor):
        found.tensors[name] = (_kind_of_tensor(name, kind), value)
    elif isinstance(value, dict):
        inner = Kind.STATE if value.keys() >= OPTIMIZER_KEYS else kind
        for key, child in _items(found, value):
            _list(found, child, (*path, key), inner)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for number, child in enumerate(value):
            _list(found, child, (*path, str(number)), kind)
    elif isinstance(value, (*PLAIN, torch.Size, torch.dtype, torch.device)):
        found.values[name] = (_kind_of_value(name, kind), repr(value))


def _items(found: Saved, value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, without the prefixes that all tensor keys share."""
    prefix = _common_prefix([key for key, child in value.items() if hasattr(child, "shape")])
    if prefix:
        found.stripped.add(prefix)
    for key, child in value.items():
        plain = str(key).removeprefix(prefix)
        if "._orig_mod." in plain:  # a part of the model was compiled
            found.stripped.add("_orig_mod.")
        yield plain.replace("._orig_mod.", "."), child


def _common_prefix(keys: list[Any]) -> str:
    found = ""
    while keys and all(isinstance(key, str) for key in keys):
        more = next((one for one in PREFIXES if all(key.startswith(found + one) for key in keys)), "")
        if not more:
            break
        found += more
    return found


def _kind_of_tensor(name: str, kind: Kind) -> Kind:
    if RANDOM.search(name):
        return Kind.RANDOM
    return Kind.BUFFER if kind is Kind.PARAMETER and name.rpartition(".")[2] in BUFFERS else kind


def _kind_of_value(name: str, kind: Kind) -> Kind:
    if RANDOM.search(name):
        return Kind.RANDOM
    scheduler = any("sched" in part for part in name.lower().split(".")[:-1])
    return Kind.SETTING if kind is Kind.STATE or scheduler else Kind.VALUE
