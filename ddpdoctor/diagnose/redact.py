"""Removes host names, addresses and user names from a report. Each is always replaced by the same word."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model.reading import known
from ddpdoctor.model.slurm import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.node import Fleet

Value = TypeVar("Value")
HOST_VARIABLES = (
    "MASTER_ADDR",
    "PET_MASTER_ADDR",
    "PET_RDZV_ENDPOINT",
    "PET_LOCAL_ADDR",
    "NCCL_COMM_ID",
    "NCCL_HOSTID",
)
LIST_VARIABLES = ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_NODELIST")
OPEN_NAMES = frozenset({"", "localhost", "localhost.localdomain"})
MIN_NAME = 2
"""Shorter names are not replaced, because they would match unrelated text."""
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:]|\.\d)"
)
_HARDWARE = re.compile(r"(?<![\w:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}(?![\w:])")
_HOME = re.compile(r"(/home/|/Users/)(?!user-\d)([^/\s:,;'\"]+)")


class Redactor:
    """Replaces names and addresses in text. The same one always becomes the same word."""

    def __init__(self, hosts: Iterable[str], users: Iterable[str]) -> None:
        """Take the names to hide. Addresses are found by pattern."""
        self._words: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._learn(hosts, "host")
        self._learn(users, "user")
        longest_first = sorted(self._words, key=len, reverse=True)
        joined = "|".join(map(re.escape, longest_first))
        self._names = re.compile(rf"(?<![A-Za-z0-9_])(?:{joined})(?![A-Za-z0-9_])") if joined else None

    def text(self, text: str) -> str:
        """Return the text with placeholders."""
        if self._names:
            text = self._names.sub(lambda match: self._words[match[0]], text)
        text = _HARDWARE.sub(lambda match: self._address(match[0]), text)
        text = _ADDRESS.sub(lambda match: self._address(match[0]), text)
        return _HOME.sub(r"\1user", text)

    def value(self, value: Value) -> Value:
        """Return any value of a report with placeholders in all its texts."""
        found: Any = value
        if isinstance(value, str) and type(value) is str:
            found = self.text(value)
        elif is_dataclass(value) and not isinstance(value, type):
            found = replace(value, **{one.name: self.value(getattr(value, one.name)) for one in fields(value)})
        elif isinstance(value, dict):
            found = {self.value(key): self.value(item) for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            found = type(value)(self.value(item) for item in value)
        return found  # type: ignore[no-any-return]

    def counts(self) -> tuple[str, ...]:
        """Say how many names and addresses were replaced: "2 host names"."""
        hosts = sum(word.startswith("host-") for word in self._words.values())
        found = ((hosts, "host name"), (len(self._words) - hosts, "user name"), (len(self._addresses), "address"))
        return tuple(
            f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s") for count, noun in found
        )

    def _learn(self, names: Iterable[str], word: str) -> None:
        for name in dict.fromkeys(names):
            if len(name) >= MIN_NAME and name.lower() not in OPEN_NAMES and not _is_address(name):
                count = sum(known_word.startswith(f"{word}-") for known_word in self._words.values()) + 1
                self._words.setdefault(name, f"{word}-{count}")

    def _address(self, text: str) -> str:
        if _HARDWARE.fullmatch(text) is None and not _is_telling(text):
            return text
        return self._addresses.setdefault(text.lower(), f"address-{len(self._addresses) + 1}")


def redact(report: Report, fleet: Fleet, env: Mapping[str, str]) -> Report:
    """Return the report without host names, addresses and user names."""
    users = [env.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER")]
    return Redactor(_host_names(fleet), [user for user in users if user not in {"", "root"}]).value(report)


def _host_names(fleet: Fleet) -> list[str]:
    found: list[str] = [*fleet.silent_hosts]
    for node, process in fleet.processes():
        found.append(node.host)
        found += [_host_part(process.variables.get(name, "")) for name in HOST_VARIABLES]
        for name in LIST_VARIABLES:
            found += _expand(process.variables.get(name, ""))
    for node in fleet.nodes:
        names = known(node.names)
        if names is not None:
            found += [names.hostname, names.fqdn or ""]
            found += [lookup.name for lookup in (names.master, names.head) if lookup is not None]
    return found


def _expand(hosts: str) -> list[str]:
    try:
        return [hosts, *expand_hosts(hosts)]
    except ValueError:
        return [hosts]


def _host_part(endpoint: str) -> str:
    """Return the host of "host", "host:port"."""
    host, _, port = endpoint.rpartition(":")
    return host if host and port.isdecimal() else endpoint


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_telling(text: str) -> bool:
    """Return whether a text is an address that identifies a machine, so not loopback or 0.0.0.0."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)
