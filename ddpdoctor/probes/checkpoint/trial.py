"""What ``torch.load`` itself says of a file, without reading its tensors: weights_only=True, onto no device."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def try_load(path: Path, *, named: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the functions and classes for which torch refuses a zip archive, and what else it says against it.

    ``named`` are those that the file names: where torch does not say which it minds, it may be any of them.
    """
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        return _refused(path, named), "" if named else _first_line(error)
    except NotImplementedError:
        return (), ""  # of the device without memory, that it has no quantized or nested tensors: nothing of the file
    except Exception as error:  # noqa: BLE001 - the bytes of a damaged file may lead anywhere
        return (), _first_line(error)
    return (), ""


def _refused(path: Path, named: tuple[str, ...]) -> tuple[str, ...]:
    from torch import serialization

    ask = getattr(serialization, "get_unsafe_globals_in_checkpoint", None)  # since torch 2.6
    try:
        found = tuple(ask(path)) if ask is not None else ()
    except Exception:  # noqa: BLE001 - it has been read by us already: what torch names is a help, no more
        found = ()
    return tuple(found) or named


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]
