"""Collects all facts of `check-checkpoint` from the given paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.saved import Checkpoints, Expected, FileSeen, Form, Gap, Leftover, ReadState, TensorIn
from ddpdoctor.model.words import grouped
from ddpdoctor.probes.checkpoint.distributed import is_distributed, read_distributed
from ddpdoctor.probes.checkpoint.files import Extent, read_file
from ddpdoctor.probes.checkpoint.nearby_files import SUFFIXES, find_gaps, find_leftovers, list_folder
from ddpdoctor.probes.load_torch import import_torch
from ddpdoctor.probes.user_code import load_callable, users_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """What the user asked for."""

    paths: tuple[Path, ...]
    model: str | None = None
    """``package.module:function``."""
    same: bool = False
    """Whether the files are copies of one checkpoint."""
    quick: bool = False
    """Whether to read only the index, without checksums and values."""


def read_checkpoints(wanted: CheckpointOptions, progress: Callable[[str], None]) -> Checkpoints:
    """Read all files. ``progress`` is called with each path before it is read. Raises ``UserError``."""
    import_torch()
    paths = tuple(path for given in wanted.paths for path in _expand(given))
    expected = None if wanted.model is None else read_expected(wanted.model)
    copies = _find_copies(paths, same=wanted.same)
    compared = {number for group in copies for number in group}
    files = []
    for number, path in enumerate(paths):
        progress(str(path))
        files.append(
            _read(path, Extent(checksums=not wanted.quick, values=not wanted.quick, digests=number in compared))
        )
    folders = {path.parent: list_folder(path.parent) for path in paths}
    return Checkpoints(
        files=tuple(files),
        expected=expected,
        copies=copies,
        same_asked=wanted.same,
        leftovers=tuple(dict.fromkeys(_leftovers(paths, folders, set(wanted.paths)))),
        gaps=_unique_gaps(one for path in paths for one in find_gaps(path, folders[path.parent])),
    )


def _expand(path: Path) -> tuple[Path, ...]:
    """Return the path itself, or the checkpoint files in it if it is a folder that is not a checkpoint itself."""
    try:
        is_there = path.exists()
    except OSError as error:  # a folder above it may not be entered
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not is_there:
        near = sorted(one.name for one in path.parent.glob(f"{path.stem}*"))[:3] if path.parent.is_dir() else []
        hint = f"There is {', '.join(near)}." if near else ""
        raise UserError(f"there is no {path}", help=hint)
    if not path.is_dir() or is_distributed(path):
        return (path,)
    found = tuple(sorted(one for one in path.iterdir() if one.is_file() and one.suffix.lower() in SUFFIXES))
    if not found:
        raise UserError(f"{path} has no checkpoint", help=f"Checkpoint files end in one of: {', '.join(SUFFIXES)}.")
    return found


def _read(path: Path, extent: Extent) -> FileSeen:
    try:
        return read_distributed(path, checksums=extent.checksums) if path.is_dir() else read_file(path, extent)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # noqa: BLE001 - collectors catch everything: a damaged file may raise anything
        form = Form.FOLDER if path.is_dir() else Form.FOREIGN
        detail = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
        return FileSeen(path=str(path), size_bytes=0, form=form, state=ReadState.UNREADABLE, detail=detail)


def read_expected(function: str) -> Expected:
    """Return the tensors of the model that the user's function builds. Raises ``UserError``."""
    make = load_callable(function, "--model")
    with users_turn(f"--model {function} failed"):
        state = _state_dict(make())
    if state is None:
        raise UserError(f"--model {function} does not return a module", help="Return the model, before DDP wraps it.")
    return Expected(
        function=function,
        tensors=tuple(
            TensorIn(name=name, shape=tuple(one.shape), dtype=str(one.dtype).removeprefix("torch."))
            for name, one in state.items()
            if hasattr(one, "shape") and hasattr(one, "dtype")
        ),
    )


def _state_dict(made: Any) -> dict[str, Any] | None:
    if isinstance(made, tuple) and made:  # (module, optimizer), which `check-consistency --model` accepts too
        made = made[0]
    if isinstance(made, dict):
        return made
    state = getattr(made, "state_dict", None)
    found: dict[str, Any] | None = state() if callable(state) else None
    return found


def _find_copies(paths: Sequence[Path], *, same: bool) -> tuple[tuple[int, ...], ...]:
    if same:
        return (tuple(range(len(paths))),) if len(paths) > 1 else ()
    by_name = grouped((path.name, number) for number, path in enumerate(paths))
    return tuple(tuple(group) for group in by_name.values() if len(group) > 1)


def _leftovers(
    paths: Sequence[Path], folders: Mapping[Path, Mapping[str, int]], given: Collection[Path]
) -> Iterator[Leftover]:
    for path in paths:
        yield from find_leftovers(path, folders[path.parent], of_folder=path.parent in given)


def _unique_gaps(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    return tuple({gap.pattern: gap for gap in gaps}.values())
