"""Asks ``torch.load`` itself about a file without reading its tensors: weights_only=True, on the meta device."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def try_load(path: Path, *, named: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the functions and classes for which torch refuses a zip archive, and any other error of torch.

    ``named`` are those that the file names. If torch does not say which it refuses, it may be any of them.
    """
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        return _refused(path, named), "" if named else _first_line(error)
    except NotImplementedError:
        return (), ""  # the meta device has no quantized or nested tensors, which says nothing about the file
    except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
        return (), _first_line(error)
    return (), ""


def _refused(path: Path, named: tuple[str, ...]) -> tuple[str, ...]:
    from torch import serialization

    ask = getattr(serialization, "get_unsafe_globals_in_checkpoint", None)  # since torch 2.6
    try:
        found = tuple(ask(path)) if ask is not None else ()
    except Exception:  # noqa: BLE001 - we have read the file already, and torch's list is only a refinement
        found = ()
    return tuple(found) or named


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]
