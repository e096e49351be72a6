"""Checks folders of ``torch.distributed.checkpoint``: whether all files that ``.metadata`` names exist and are whole.

Source: ``torch/distributed/checkpoint/filesystem.py``, ``_StorageInfo``: each item is a byte range of a file, written
by ``torch.save``.
"""

from __future__ import annotations

import errno
import io
import zipfile
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from ddpdoctor.model.saved import (
    MODEL_KEYS,
    Checksums,
    Contents,
    Damage,
    FileSeen,
    Form,
    ReadState,
    StatePart,
    TensorIn,
    Weights,
)
from ddpdoctor.probes.checkpoint.pickles import DTYPES, MOST_ELEMENTS, Opaque, Unreadable, read_pickle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

METADATA = ".metadata"


class _Window(io.RawIOBase):
    """A byte range of a file as a separate file object. Only what is being read is in memory."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A part of the state, and the bytes that hold it."""

    name: str
    file: str
    offset: int
    length: int


def is_distributed(folder: Path) -> bool:
    """Return whether a folder is such a checkpoint, or the rest of one."""
    return (folder / METADATA).is_file() or any(folder.glob("*.distcp"))


def read_distributed(folder: Path, *, checksums: bool) -> FileSeen:
    """Read a folder. Raises ``OSError``."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    seen = FileSeen(path=str(folder), size_bytes=size, form=Form.FOLDER, state=ReadState.WHOLE)
    if folder / METADATA not in files:
        detail = f"it holds {sum(path.suffix == '.distcp' for path in files)} .distcp files and no {METADATA}"
        return replace(seen, state=ReadState.CUT, detail=detail)
    try:
        with (folder / METADATA).open("rb") as file:
            root = read_pickle(file).root
        items, tensors = tuple(_items(root)), tuple(_tensors(root))
    except Unreadable as error:
        return replace(seen, state=ReadState.UNREADABLE, detail=f"{METADATA}: {error}")
    return replace(
        seen,
        checksums=Checksums.CHECKED if checksums else Checksums.NOT_READ,
        damaged=tuple(_damaged(folder, items)) if checksums else (),
        missing=tuple(_missing(folder, items)),
        contents=_describe(tensors, items),
    )


def _items(root: Any) -> Iterator[_Item]:
    for index, info in _field(root, "storage_data", dict).items():
        item = _Item(
            name=_field(index, "fqn", str),
            file=_field(info, "relative_path", str),
            offset=_field(info, "offset", int),
            length=_field(info, "length", int),
        )
        if not 0 <= item.offset < MOST_ELEMENTS or not 0 <= item.length < MOST_ELEMENTS:
            raise Unreadable(f"it has an impossible place for {item.name}")
        if not _is_inside(item.file):
            raise Unreadable(f"it names a file outside of the folder ({item.file})")
        yield item


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return "\0" not in name and not path.is_absolute() and ".." not in path.parts and path.name != ""


def _field(record: Any, name: str, kind: type) -> Any:
    state = record.state if isinstance(record, Opaque) else None
    value = state.get(name) if isinstance(state, dict) else None
    if not isinstance(value, kind):
        raise Unreadable(f"it has no {name}")
    return value


def _tensors(root: Any) -> Iterator[TensorIn]:
    for name, metadata in _field(root, "state_dict_metadata", dict).items():
        state = metadata.state if isinstance(metadata, Opaque) else None
        size = state.get("size") if isinstance(state, dict) else None
        if isinstance(size, tuple) and isinstance(state, dict):
            yield TensorIn(name=str(name), shape=size, dtype=_dtype(state.get("properties")))


def _dtype(properties: Any) -> str:
    """Return the dtype among the properties, which are pickled as a dict or a tuple."""
    state = properties.state if isinstance(properties, Opaque) else properties
    values = state.values() if isinstance(state, dict) else state if isinstance(state, tuple) else ()
    return next((value for value in values if isinstance(value, str) and value in DTYPES), "")


def _missing(folder: Path, items: Iterable[_Item]) -> Iterator[str]:
    needed: dict[str, int] = {}
    for item in items:
        needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
    for name, size in sorted(needed.items()):
        path = folder / name
        if not path.is_file():
            yield f"{name} is not there"
        elif path.stat().st_size < size:
            yield f"{name} has {path.stat().st_size} of {size} bytes"


def _damaged(folder: Path, items: Iterable[_Item]) -> Iterator[Damage]:
    for item in items:
        path = folder / item.file
        if path.is_file() and path.stat().st_size >= item.offset + item.length and not _is_sound(path, item):
            yield Damage(record=f"{item.file} at {item.offset}", tensors=(item.name,))


def _is_sound(path: Path, item: _Item) -> bool:
    with path.open("rb") as file:
        content = _Window(file, item.offset, item.length)
        try:
            if not zipfile.is_zipfile(content):
                return True  # compressed or another format: it has no checksum to verify
            with zipfile.ZipFile(content) as archive:
                return not any(info.CRC for info in archive.infolist()) or archive.testzip() is None
        except Exception:  # noqa: BLE001 - with a flipped bit in a header, zipfile may raise anything
            return False


def _describe(tensors: tuple[TensorIn, ...], items: Iterable[_Item]) -> Contents:
    """Recognize parts by the first word of their names, which the script chose."""
    names = {item.name.partition(".")[0].lower() for item in items} | {
        one.name.partition(".")[0].lower() for one in tensors
    }
    parts = [StatePart.MODEL] if tensors else []
    parts += [StatePart.OPTIMIZER] if any(name.startswith("optim") for name in names) else []
    model = tuple(one for one in tensors if not one.name.lower().startswith("optim"))
    where = _common_key(model)
    cut = len(where) + 1 if where else 0
    weights = Weights(
        where=where,
        tensors=tuple(TensorIn(name=one.name[cut:], shape=one.shape, dtype=one.dtype) for one in model),
    )
    return Contents(tensors=tensors, weights=(weights,) if model else (), parts=tuple(parts))


def _common_key(tensors: tuple[TensorIn, ...]) -> str:
    """Return the key above all tensors of the model, such as "model", or "" if there is none."""
    first = {one.name.partition(".")[0] for one in tensors}
    return first.pop() if len(first) == 1 and first & MODEL_KEYS else ""
