"""A bundle of a run that can be sent to others: it contains no secrets."""

from __future__ import annotations

import io
import ipaddress
import re
import struct
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model.bandwidth import Bench
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import expand_hosts
from ddpdoctor.model.reading import known
from ddpdoctor.recorder.storage.secrets import hide_in_text, hide_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.node import Fleet

Value = TypeVar("Value")
HOSTS = ("MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_LOCAL_ADDR", "NCCL_COMM_ID", "NCCL_HOSTID")
HOST_LISTS = ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_NODELIST")
OPEN_NAMES = frozenset({"", "localhost", "localhost.localdomain"})
MIN_NAME = 2  # shorter names are not replaced, because they would match unrelated text
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:]|\.\d)"
)
_HARDWARE = re.compile(r"(?<![\w:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}(?![\w:])")
_HOME = re.compile(r"(/home/|/Users/)(?!user-\d)([^/\s:,;'\"]+)")


def map_texts(value: Any, change: Callable[[Any, str], str], key: Any = None) -> Any:
    """Return a value of a report with all its texts changed. ``change`` gets the key of a text in a dict, or None."""
    if isinstance(value, str) and type(value) is str:
        return change(key, value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: map_texts(getattr(value, field.name), change) for field in fields(value)})
    if isinstance(value, dict):
        return {map_texts(name, change): map_texts(item, change, name) for name, item in value.items()}
    return type(value)(map_texts(item, change) for item in value) if isinstance(value, (list, tuple)) else value


class Redactor:
    """Replaces names and addresses in text. The same one always becomes the same word."""

    def __init__(self, hosts: Iterable[str], users: Iterable[str]) -> None:
        self._words: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._learn(hosts, "host")
        self._learn(users, "user")
        longest_first = sorted(self._words, key=len, reverse=True)
        joined = "|".join(map(re.escape, longest_first))
        self._names = re.compile(rf"(?<![A-Za-z0-9_])(?:{joined})(?![A-Za-z0-9_])") if joined else None

    def text(self, text: str) -> str:
        if self._names:
            text = self._names.sub(lambda match: self._words[match[0]], text)
        text = _HARDWARE.sub(lambda match: self._address(match[0]), text)
        text = _ADDRESS.sub(lambda match: self._address(match[0]), text)
        return _HOME.sub(r"\1user", text)

    def value(self, value: Value) -> Value:
        return map_texts(value, lambda _, text: self.text(text))  # type: ignore[no-any-return]

    def counts(self) -> tuple[str, ...]:
        """Describe how many names and addresses were replaced: "2 host names"."""
        hosts = sum(word.startswith("host-") for word in self._words.values())
        found = ((hosts, "host name"), (len(self._words) - hosts, "user name"), (len(self._addresses), "address"))
        endings = ("" if count == 1 else "es" if noun.endswith("s") else "s" for count, noun in found)
        return tuple(f"{count} {noun}{ending}" for (count, noun), ending in zip(found, endings, strict=True))

    def _learn(self, names: Iterable[str], word: str) -> None:
        for name in dict.fromkeys(names):
            if len(name) >= MIN_NAME and name.lower() not in OPEN_NAMES and _address_in(name) is None:
                count = sum(known_word.startswith(f"{word}-") for known_word in self._words.values()) + 1
                self._words.setdefault(name, f"{word}-{count}")

    def _address(self, text: str) -> str:
        address = _address_in(text)
        is_telling = address is not None and not (address.is_loopback or address.is_unspecified)
        if _HARDWARE.fullmatch(text) is None and not is_telling:
            return text
        return self._addresses.setdefault(text.lower(), f"address-{len(self._addresses) + 1}")


def redact(report: Report, fleet: Fleet, env: Mapping[str, str]) -> Report:
    users = [env.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER")]
    found: list[str] = [*fleet.silent_hosts]
    for node, process in fleet.processes():
        found.append(node.host)
        for name in HOSTS:
            place = process.variables.get(name, "")  # "host" or "host:port"
            found.append(re.sub(r"(?<=.):\d+$", "", place))
        for name in HOST_LISTS:
            hosts = process.variables.get(name, "")
            found.append(hosts)
            with suppress(ValueError):
                found += expand_hosts(hosts)
    for node in fleet.nodes:
        names = known(node.names)
        if names is not None:
            found += [names.hostname, names.fqdn or ""]
            found += [lookup.name for lookup in (names.master, names.head) if lookup is not None]
    return Redactor(found, [user for user in users if user not in {"", "root"}]).value(report)


def _address_in(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
SOURCE_KEY = "source"  # the lines of the user's file, which are left out unless they are wanted
# The parts of a report's data that are handed on. A part that is not named here stays where it is.
DATA_KEYS = frozenset({
    "advice", "attempts", "comparison", "consistency", "curves", "diff", "drawn", "evidence", "files", "gathering",
    "hosts", "launcher", "loads", "missing_ranks", "nodes", "reasons", "rendezvous", "run", "scaling", "sections",
    "shares", "speed", "steps", "timeline", "trial", "tune", "verb", "waits", "world_size",
    *(field.name for field in fields(Bench)),
})  # fmt: skip
# Keys of a report's data whose values are names of hosts.
HOST_KEYS = frozenset({"host", "hosts", "hostname", "fqdn", "missing_hosts"})
MAX_BYTES = 64 << 20  # Our choice: no report is larger. A larger file in an archive is refused before it is unpacked.
# ``pack`` uses the second. Others may ask for gigabytes of memory.
_PACKED_BY = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# What zipfile raises for archives that are damaged, encrypted, or packed in a way that it does not know.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError, OSError, OverflowError, RuntimeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A report that can be shared, and what was changed in it."""

    report: Report
    hidden: tuple[str, ...]  # what was replaced, in words: "2 host names"
    left_out: tuple[str, ...]  # what the run folder has and the bundle has not


def make_bundle(report: Report, users: Iterable[str], *, with_source: bool) -> Bundle:
    """Redact a report twice: first by allow-list, then what looks like a secret, a name or an address."""
    keys = DATA_KEYS | {SOURCE_KEY} if with_source else DATA_KEYS
    allowed = replace(report, data={key: value for key, value in encode(report.data).items() if key in keys})
    clean, secrets = without_secrets(allowed)
    redactor = Redactor(sorted(set(_hosts_in(clean))), [user for user in users if user not in {"", "root"}])
    redacted = redactor.value(clean)
    dropped = sorted(report.data.keys() - keys)
    hidden = (*redactor.counts(), f"{secrets} {'text' if secrets == 1 else 'texts'} with a secret")
    return Bundle(report=redacted, hidden=hidden, left_out=tuple(f"data.{key} of the report" for key in dropped))


def without_secrets(value: Value) -> tuple[Value, int]:
    """Return a value without the secrets in its texts, and how many of these had one."""
    count = 0

    def hide(key: Any, text: str) -> str:
        nonlocal count
        shown = hide_value(key, text) if isinstance(key, str) else hide_in_text(text)
        count += shown != text
        return shown

    return map_texts(value, hide), count


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
        for field in fields(value):
            yield from _hosts_in(getattr(value, field.name), field.name)


def pack(files: dict[str, str]) -> bytes:
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
            f"{path} is not a ddpdoctor bundle: it has no readable {REPORT_FILE}",
            help="Give an archive that `ddpdoctor bundle` wrote. If it was copied, copy it again and compare sizes.",
        ) from error
    if len(content) > MAX_BYTES:
        large = f"{path}: {REPORT_FILE} in it is above {MAX_BYTES >> 20} MiB, larger than any report"
        raise UserError(large, help="Give an archive that `ddpdoctor bundle` wrote.")
    return content
