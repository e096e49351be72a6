"""Checks the files next to checkpoints: leftover temporary files, files much smaller than others, missing numbers."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

from ddpdoctor.model.saved import Gap, Leftover

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp", ".tar", ".pkl", ".model")
TEMPORARY = re.compile(r"([._-]?(tmp|temp|part|partial|incomplete|writing|inprogress)([._-]?\w*)?|~)$", re.IGNORECASE)
"""Suffixes that writers add to a name until the file is complete."""
BEFORE = re.compile(r"^(\.?(tmp|temp)[._-]?|\.(?=.*\.(tmp|new|part)))", re.IGNORECASE)
RANK = re.compile(r"(?<![a-z])(rank|shard|part|mp|pp|tp|dp|node|worker)([_-]?)(\d+)(?!\d)", re.IGNORECASE)
PART_OF = re.compile(r"-(\d{5})-of-(\d{5})(?!\d)")
"""How Hugging Face's libraries number the files of one model."""
MUCH_SMALLER = 0.5
"""Our choice: this share of the median size of files whose names differ only in numbers. Files of one training have the
same size within a few percent. The first may lack optimizer state, two thirds of it, and is then reported as a
question."""
FEWEST_LIKE = 2
MOST_NUMBER = 100_000
"""Our choice: larger numbers are dates or steps and not ranks or parts, so files in between are not missing."""
MOST_ENTRIES = 20_000


def list_folder(folder: Path) -> dict[str, int]:
    """Return the sizes of a folder's files by name. If reading fails, return what was found before."""
    found: dict[str, int] = {}
    try:
        for path, _ in zip(folder.iterdir(), range(MOST_ENTRIES), strict=False):
            if path.is_file():
                found[path.name] = path.stat().st_size
    except OSError:
        return found
    return found


def find_leftovers(path: Path, sizes: Mapping[str, int], *, of_folder: bool) -> Iterator[Leftover]:
    """Yield the temporary files of unfinished writes, and ``path`` itself if it is much smaller than similar files.

    ``sizes`` has the files of the folder. If the folder itself was given, all temporary files in it count. Otherwise
    only those whose final names differ from ``path`` in numbers only.
    """
    for name in sorted(sizes):
        final = _final_name(name)
        if final is not None and (of_folder or name == path.name or _shape(final) == _shape(path.name)):
            yield Leftover(
                path=str(path.with_name(name)), kind="a temporary file of a write", detail=_beside(name, sizes)
            )
    like = [size for name, size in sizes.items() if name != path.name and _shape(name) == _shape(path.name)]
    if len(like) >= FEWEST_LIKE and path.name in sizes:
        share = sizes[path.name] / max(1.0, statistics.median(like))
        if share < MUCH_SMALLER:
            usual = round(statistics.median(like))
            detail = f"{sizes[path.name]} bytes, where {len(like)} files of the same kind have {usual}"
            yield Leftover(path=str(path), kind="much smaller than similar files", detail=detail)


def _final_name(name: str) -> str | None:
    """Return the final name of a temporary file, or None if the file is not temporary."""
    trimmed = TEMPORARY.sub("", name)
    if trimmed == name or not trimmed.lower().endswith(SUFFIXES):
        stripped = BEFORE.sub("", name)
        trimmed = TEMPORARY.sub("", stripped)
        if stripped == name or not trimmed.lower().endswith(SUFFIXES):
            return None
    return trimmed.removeprefix(".")


def _beside(name: str, sizes: Mapping[str, int]) -> str:
    final = _final_name(name) or ""
    words = f"{sizes.get(name, 0)} bytes"
    return f"{words}; {final} has {sizes[final]}" if final in sizes else f"{words}; there is no {final}"


def _shape(name: str) -> str:
    """Return a name with each number replaced by "#"."""
    return re.sub(r"\d+", "#", name)


def find_gaps(path: Path, names: Iterable[str]) -> Iterator[Gap]:
    """Yield the missing files of a set that belongs together by a rank or part number in the names."""
    known = set(names)
    match = PART_OF.search(path.name)
    if match is not None:
        yield from _missing_parts(path.name, match, known)
        return
    for found in RANK.finditer(path.name):
        yield from _missing_ranks(path.name, found.span(3), known)


def _missing_parts(name: str, match: re.Match[str], known: Collection[str]) -> Iterator[Gap]:
    count = int(match[2])
    wanted = [f"{name[: match.start(1)]}{number:05d}{name[match.end(1) :]}" for number in range(1, count + 1)]
    missing = tuple(one for one in wanted if one not in known)
    if missing:
        pattern = f"{name[: match.start(1)]}*{name[match.end(1) :]}"
        yield Gap(pattern=pattern, missing=missing, why=f"the names say that there are {count}")


def _missing_ranks(name: str, span: tuple[int, int], known: Collection[str]) -> Iterator[Gap]:
    """Find ranks that other steps have but this one lacks, and gaps between the numbers."""
    before, after = name[: span[0]], name[span[1] :]
    digits = span[1] - span[0]
    groups: dict[str, set[int]] = {}
    form = re.compile(f"({_open(before)})" + r"(\d+)" + f"({_open(after)})")
    for one in known:
        found = form.fullmatch(one)
        if found is not None:
            groups.setdefault(f"{found[1]}*{found[3]}", set()).add(int(found[2]))
    own = groups.pop(f"{before}*{after}", set())
    elsewhere = set().union(*groups.values()) if groups else set()
    highest = max(own, default=0)
    missing = (elsewhere | set(range(highest if highest < MOST_NUMBER else 0))) - own
    if missing and len(own | elsewhere) > 1:
        why = "files of other steps have them" if missing <= elsewhere else "their numbers lie below that of others"
        names = tuple(
            f"{before}{number:0{digits if name[span[0]] == '0' else 1}d}{after}" for number in sorted(missing)
        )
        yield Gap(pattern=f"{before}*{after}", missing=names, why=why)


def _open(text: str) -> str:
    """Return a regular expression for a text that matches any numbers."""
    return r"\d+".join(re.escape(part) for part in re.split(r"\d+", text))
