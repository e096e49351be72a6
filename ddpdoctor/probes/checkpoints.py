"""Collects the facts of `check-checkpoint`: files, folders of torch.distributed.checkpoint, and neighboring files."""

from __future__ import annotations

import errno
import io
import re
import statistics
import zipfile
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from ddpdoctor.model import saved
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.words import grouped
from ddpdoctor.probes.checkpoint_file import Extent, read_file
from ddpdoctor.probes.checkpoint_formats import DTYPES, MOST_ELEMENTS, Opaque, Unreadable, read_pickle
from ddpdoctor.probes.loading import import_torch, load_callable, users_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

MOST_CHARACTERS = 300
METADATA = ".metadata"
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp", ".tar", ".pkl", ".model")
# Suffixes that writers add to a name until the file is complete.
TEMPORARY = re.compile(r"([._-]?(tmp|temp|part|partial|incomplete|writing|inprogress)([._-]?\w*)?|~)$", re.IGNORECASE)
BEFORE = re.compile(r"^(\.?(tmp|temp)[._-]?|\.(?=.*\.(tmp|new|part)))", re.IGNORECASE)
RANK = re.compile(r"(?<![a-z])(rank|shard|part|mp|pp|tp|dp|node|worker)([_-]?)(\d+)(?!\d)", re.IGNORECASE)
PART_OF = re.compile(r"-(\d{5})-of-(\d{5})(?!\d)")  # how Hugging Face's libraries number the files of one model
# Our choice: this share of the median size of files whose names differ only in numbers. Files of one training have the
# same size within a few percent. The first may lack optimizer state, two thirds of it, and is then reported as a
# question.
MUCH_SMALLER = 0.5
FEWEST_LIKE = 2
# Our choice: larger numbers are dates or steps and not ranks or parts, so files in between are not missing.
MOST_NUMBER = 100_000
MOST_ENTRIES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """What the user asked for."""

    paths: tuple[Path, ...]
    model: str | None = None  # ``package.module:function``
    same: bool = False  # whether the files are copies of one checkpoint
    quick: bool = False  # whether to read only the index, without checksums and values


def read_checkpoints(wanted: CheckpointOptions, progress: Callable[[str], None]) -> saved.Checkpoints:
    """Read all files. ``progress`` is called with each path before it is read. Raises ``UserError``."""
    import_torch()
    paths = tuple(path for given in wanted.paths for path in _expand(given))
    expected = None if wanted.model is None else read_expected(wanted.model)
    by_name = grouped(("" if wanted.same else path.name, number) for number, path in enumerate(paths))
    copies = tuple(tuple(group) for group in by_name.values() if len(group) > 1)
    compared = {number for group in copies for number in group}
    files = []
    for number, path in enumerate(paths):
        progress(str(path))
        files.append(_read_checkpoint(path, Extent(whole=not wanted.quick, digests=number in compared)))
    folders: dict[Path, dict[str, int]] = {path.parent: {} for path in paths}
    for folder, sizes in folders.items():
        with suppress(OSError):  # the sizes of its files, as far as they can be read
            for beside in filter(Path.is_file, islice(folder.iterdir(), MOST_ENTRIES)):
                sizes[beside.name] = beside.stat().st_size
    gaps: dict[str, saved.Gap] = {}
    leftovers: dict[saved.Leftover, None] = {}
    for path in paths:
        sizes = folders[path.parent]
        gaps |= {gap.pattern: gap for gap in find_gaps(path, sizes)}
        leftovers |= dict.fromkeys(find_leftovers(path, sizes, of_folder=path.parent in wanted.paths))
    return saved.Checkpoints(
        files=tuple(files), expected=expected, copies=copies, same_asked=wanted.same, leftovers=tuple(leftovers),
        gaps=tuple(gaps.values()),
    )  # fmt: skip


def _expand(path: Path) -> tuple[Path, ...]:
    """Return the path itself, or the checkpoint files in it if it is a folder that is not a checkpoint itself."""
    try:
        is_there = path.exists()
    except OSError as error:  # a folder above it may not be entered
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not is_there:
        near = sorted(file.name for file in path.parent.glob(f"{path.stem}*"))[:3] if path.parent.is_dir() else []
        hint = f"Similar names: {', '.join(near)}." if near else ""
        raise UserError(f"{path} does not exist", help=hint)
    # A folder of torch.distributed.checkpoint, or the rest of one, is one checkpoint.
    if not path.is_dir() or (path / METADATA).is_file() or any(path.glob("*.distcp")):
        return (path,)
    found = tuple(sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES))
    if not found:
        raise UserError(f"{path} has no checkpoint", help=f"Checkpoint files end in one of: {', '.join(SUFFIXES)}.")
    return found


def _read_checkpoint(path: Path, extent: Extent) -> saved.FileSeen:
    try:
        return read_distributed(path, checksums=extent.whole) if path.is_dir() else read_file(path, extent)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # noqa: BLE001 - collectors catch everything: a damaged file may raise anything
        form = saved.Form.FOLDER if path.is_dir() else saved.Form.FOREIGN
        detail = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
        return saved.FileSeen(path=str(path), size_bytes=0, form=form, state=saved.ReadState.UNREADABLE, detail=detail)


def read_expected(function: str) -> saved.Expected:
    """Return the tensors of the model that the user's function builds. Raises ``UserError``."""
    make = load_callable(function, "--model")
    with users_turn(f"--model {function} failed"):
        made = make()
        if isinstance(made, tuple) and made:  # (module, optimizer), which `check-consistency --model` accepts too
            made = made[0]
        save = getattr(made, "state_dict", None)
        state = made if isinstance(made, dict) else save() if callable(save) else None
    if state is None:
        raise UserError(f"--model {function} does not return a module", help="Return the model, before DDP wraps it.")
    return saved.Expected(
        function=function,
        tensors=tuple(
            saved.TensorIn(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in state.items()
            if hasattr(tensor, "shape") and hasattr(tensor, "dtype")
        ),
    )


class _Window(io.RawIOBase):
    """A byte range of a file as a separate file object. Only what is being read is in memory."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    name: str
    file: str
    offset: int
    length: int


def read_distributed(folder: Path, *, checksums: bool) -> saved.FileSeen:
    """Read a folder of torch.distributed.checkpoint. Raises ``OSError``."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    seen = saved.FileSeen(path=str(folder), size_bytes=size, form=saved.Form.FOLDER, state=saved.ReadState.WHOLE)
    if folder / METADATA not in files:
        detail = f"it holds {sum(path.suffix == '.distcp' for path in files)} .distcp files and no {METADATA}"
        return replace(seen, state=saved.ReadState.CUT, detail=detail)
    try:
        with (folder / METADATA).open("rb") as file:
            root, _ = read_pickle(file)
        items, tensors = tuple(_stored_items(root)), tuple(_tensors(root))
    except Unreadable as error:
        return replace(seen, state=saved.ReadState.UNREADABLE, detail=f"{METADATA}: {error}")
    # Recognize parts by the first word of their names, which the script chose
    names = [item.name for item in items] + [tensor.name for tensor in tensors]
    parts = [saved.StatePart.MODEL] if tensors else []
    parts += [saved.StatePart.OPTIMIZER] if any(name.lower().startswith("optim") for name in names) else []
    model = tuple(tensor for tensor in tensors if not tensor.name.lower().startswith("optim"))
    first = {tensor.name.partition(".")[0] for tensor in model}
    where = first.pop() if len(first) == 1 and first & saved.MODEL_KEYS else ""
    cut = len(where) + 1 if where else 0
    weights = saved.Weights(where=where, tensors=tuple(replace(tensor, name=tensor.name[cut:]) for tensor in model))
    return replace(
        seen,
        checksums=saved.Checksums.CHECKED if checksums else saved.Checksums.NOT_READ,
        damaged=tuple(_damaged(folder, items)) if checksums else (),
        missing=tuple(_missing(folder, items)),
        contents=saved.Contents(tensors=tensors, weights=(weights,) if model else (), parts=tuple(parts)),
    )


def _stored_items(root: Any) -> Iterator[_Item]:
    for index, info in _field(root, "storage_data", dict).items():
        item = _Item(
            name=_field(index, "fqn", str), file=_field(info, "relative_path", str),
            offset=_field(info, "offset", int), length=_field(info, "length", int),
        )  # fmt: skip
        if not 0 <= item.offset < MOST_ELEMENTS or not 0 <= item.length < MOST_ELEMENTS:
            raise Unreadable(f"it has an impossible location for {item.name}")
        path = PurePosixPath(item.file)
        if "\0" in item.file or path.is_absolute() or ".." in path.parts or path.name == "":
            raise Unreadable(f"it names a file outside of the folder ({item.file})")
        yield item


def _field(record: Any, name: str, kind: type) -> Any:
    state = record.state if isinstance(record, Opaque) else None
    value = state.get(name) if isinstance(state, dict) else None
    if not isinstance(value, kind):
        raise Unreadable(f"it has no {name}")
    return value


def _tensors(root: Any) -> Iterator[saved.TensorIn]:
    for name, metadata in _field(root, "state_dict_metadata", dict).items():
        state = metadata.state if isinstance(metadata, Opaque) else None
        size = state.get("size") if isinstance(state, dict) else None
        if isinstance(size, tuple) and isinstance(state, dict):
            # The dtype is among the properties, which are pickled as a dict or a tuple.
            properties = state.get("properties")
            held = properties.state if isinstance(properties, Opaque) else properties
            values = held.values() if isinstance(held, dict) else held if isinstance(held, tuple) else ()
            dtype = next((value for value in values if isinstance(value, str) and value in DTYPES), "")
            yield saved.TensorIn(name=str(name), shape=size, dtype=dtype)


def _missing(folder: Path, items: Iterable[_Item]) -> Iterator[str]:
    needed: dict[str, int] = {}
    for item in items:
        needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
    for name, size in sorted(needed.items()):
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size < size:
            yield f"{name} has {path.stat().st_size} of {size} bytes"


def _damaged(folder: Path, items: Iterable[_Item]) -> Iterator[saved.Damage]:
    for item in items:
        path = folder / item.file
        if not path.is_file() or path.stat().st_size < item.offset + item.length:
            continue
        is_sound = True
        with path.open("rb") as file:
            content = _Window(file, item.offset, item.length)
            try:
                if zipfile.is_zipfile(content):  # else compressed or another format: it has no checksum to verify
                    with zipfile.ZipFile(content) as archive:
                        is_sound = not any(info.CRC for info in archive.infolist()) or archive.testzip() is None
            except Exception:  # noqa: BLE001 - with a flipped bit in a header, zipfile may raise anything
                is_sound = False
        if not is_sound:
            yield saved.Damage(record=f"{item.file} at {item.offset}", tensors=(item.name,))


def find_leftovers(path: Path, sizes: Mapping[str, int], *, of_folder: bool) -> Iterator[saved.Leftover]:
    """Yield the temporary files of unfinished writes, and ``path`` itself if it is much smaller than similar files.

    ``sizes`` has the files of the folder. If the folder itself was given, all temporary files in it count. Otherwise
    only those whose final names differ from ``path`` in numbers only.
    """
    for name in sorted(sizes):
        stripped = BEFORE.sub("", name)
        plain = (TEMPORARY.sub("", name), TEMPORARY.sub("", stripped) if stripped != name else name)
        final = next((file for file in plain if file != name and file.lower().endswith(SUFFIXES)), "").removeprefix(".")
        if final and (of_folder or name == path.name or _name_shape(final) == _name_shape(path.name)):
            beside = f"{final} has {sizes[final]}" if final in sizes else f"there is no {final}"
            detail = f"{sizes[name]} bytes; {beside}"
            yield saved.Leftover(path=str(path.with_name(name)), kind="a temporary file of a write", detail=detail)
    like = [size for name, size in sizes.items() if name != path.name and _name_shape(name) == _name_shape(path.name)]
    if len(like) >= FEWEST_LIKE and path.name in sizes:
        usual = statistics.median(like)
        if sizes[path.name] / max(1.0, usual) < MUCH_SMALLER:
            detail = f"{sizes[path.name]} bytes, where {len(like)} files of the same kind have {round(usual)}"
            yield saved.Leftover(path=str(path), kind="much smaller than similar files", detail=detail)


def _name_shape(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def find_gaps(path: Path, names: Iterable[str]) -> Iterator[saved.Gap]:
    """Yield the missing files of a set that belongs together by a rank or part number in the names."""
    known = set(names)
    match = PART_OF.search(path.name)
    if match is not None:
        name = path.name
        before, after, count = name[: match.start(1)], name[match.end(1) :], int(match[2])
        wanted = [f"{before}{number:05d}{after}" for number in range(1, count + 1)]
        if missing := tuple(name for name in wanted if name not in known):
            yield saved.Gap(pattern=f"{before}*{after}", missing=missing, why=f"the names promise {count}")
        return
    # Ranks that other steps have but this one lacks, and gaps between the numbers
    for numbered in RANK.finditer(path.name):
        before, after = path.name[: numbered.start(3)], path.name[numbered.end(3) :]
        # In the names beside it all numbers may be others.
        others = (r"\d+".join(map(re.escape, re.split(r"\d+", text))) for text in (before, after))
        form = re.compile(r"({})(\d+)({})".format(*others))
        matches = filter(None, map(form.fullmatch, known))
        groups = grouped((f"{found[1]}*{found[3]}", int(found[2])) for found in matches)
        own = set(groups.pop(f"{before}*{after}", ()))
        elsewhere = set(chain.from_iterable(groups.values()))
        highest = max(own, default=0)
        lacking = (elsewhere | set(range(highest if highest < MOST_NUMBER else 0))) - own
        if lacking and len(own | elsewhere) > 1:
            why = "other steps have these files" if lacking <= elsewhere else "their numbers are below the highest"
            digits = len(numbered[3]) if numbered[3].startswith("0") else 1
            names_of = tuple(f"{before}{number:0{digits}d}{after}" for number in sorted(lacking))
            yield saved.Gap(pattern=f"{before}*{after}", missing=names_of, why=why)
