"""Makes a bundle of a run to hand on: its report without secrets, names and addresses, in one archive."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.redact import Redactor
from ddpdoctor.model.bandwidth import Bench
from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.storage.secrets import hide_in_text, hide_value

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.model.findings import Report

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
SOURCE_KEY = "source"
"""The lines of the user's file, which are left out unless they are wanted."""
DATA_KEYS = frozenset({
    "advice", "attempts", "comparison", "consistency", "curves", "diff", "drawn", "evidence", "files", "gathering",
    "hosts", "launcher", "loads", "missing_ranks", "nodes", "reasons", "rendezvous", "run", "scaling", "sections",
    "shares", "speed", "steps", "timeline", "trial", "tune", "verb", "waits", "world_size",
    *(one.name for one in fields(Bench)),
})  # fmt: skip
"""The parts of a report's data that are handed on. A part that is not named here stays where it is."""
HOST_KEYS = frozenset({"host", "hosts", "hostname", "fqdn", "missing_hosts"})
"""Keys of a report's data whose values are names of hosts."""
MAX_BYTES = 64 << 20
"""Our choice: no report is larger. A larger file in an archive is refused before it is unpacked."""
_PACKED_BY = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""``pack`` uses the second. Others may ask for gigabytes of memory."""
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError, OSError, OverflowError, RuntimeError,
    ValueError,
)  # fmt: skip
"""What zipfile raises for archives that are damaged, encrypted, or packed in a way that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A report that may be handed on, and what was changed in it."""

    report: Report
    hidden: tuple[str, ...]
    """What was replaced, in words: "2 host names"."""
    left_out: tuple[str, ...]
    """What the run folder has and the bundle has not."""


def make_bundle(report: Report, users: Iterable[str], *, with_source: bool) -> Bundle:
    """Redact a report twice: by what is allowed, then by what looks like a secret, a name or an address."""
    keys = DATA_KEYS | {SOURCE_KEY} if with_source else DATA_KEYS
    allowed = replace(report, data={key: value for key, value in report.data.items() if key in keys})
    secrets = SecretCount()
    clean = secrets.value(allowed)
    redactor = Redactor(sorted(set(_hosts_in(clean))), [user for user in users if user not in {"", "root"}])
    redacted = redactor.value(clean)
    dropped = sorted(report.data.keys() - keys)
    return Bundle(
        report=redacted,
        hidden=(*redactor.counts(), f"{secrets.count} {'text' if secrets.count == 1 else 'texts'} with a secret"),
        left_out=tuple(f"data.{key} of the report" for key in dropped),
    )


class SecretCount:
    """Hides secrets in all texts of a value, and counts the texts that had one."""

    def __init__(self) -> None:
        """Start at 0."""
        self.count = 0

    def value(self, value: Any) -> Any:
        """Return the value without secrets."""
        if isinstance(value, str) and type(value) is str:
            shown = hide_in_text(value)
            self.count += shown != value
            return shown
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{one.name: self.value(getattr(value, one.name)) for one in fields(value)})
        if isinstance(value, dict):
            return {self.value(key): self._named(key, item) for key, item in value.items()}
        return type(value)(self.value(item) for item in value) if isinstance(value, (list, tuple)) else value

    def _named(self, name: Any, value: Any) -> Any:
        if not isinstance(name, str) or not isinstance(value, str):
            return self.value(value)
        shown = hide_value(name, value)
        self.count += shown != value
        return shown


def _hosts_in(value: Any, key: str = "") -> Iterable[str]:
    """Yield the names of hosts in a report, by the keys under which they stand."""
    if isinstance(value, str):
        if key in HOST_KEYS:
            yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _hosts_in(item, name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _hosts_in(item, key)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _hosts_in(getattr(value, one.name), one.name)


def pack(files: dict[str, str]) -> bytes:
    """Return a zip archive of texts by file name."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


def read_packed(path: Path) -> bytes:
    """Return the report file in a bundle. Nothing is unpacked to disk. Raises ``UserError`` if there is none."""
    try:
        if path.stat().st_size > MAX_BYTES:  # before its directory is read, which may be as large
            raise zipfile.BadZipFile
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(REPORT_FILE).compress_type not in _PACKED_BY:
                raise zipfile.BadZipFile
            with archive.open(REPORT_FILE) as file:
                content = file.read(MAX_BYTES + 1)
    except _DAMAGE as error:
        raise UserError(
            f"{path} is no bundle of ddpdoctor: it has no readable {REPORT_FILE}",
            help="Give an archive that `ddpdoctor bundle` wrote. If it was copied, copy it again and compare sizes.",
        ) from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: {REPORT_FILE} is larger than {MAX_BYTES >> 20} MiB", help="It is no report.")
    return content
