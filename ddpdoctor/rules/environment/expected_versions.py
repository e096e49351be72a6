"""DD106: versions that the user expects on every node."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.environment.gpus import driver_of
from ddpdoctor.rules.environment.versions import nccl_of, of_software, torch_of
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.model.node import ExpectedVersion, Fleet, Node

VERSION_OF: dict[str, Callable[[Node], str | None]] = {
    "torch": torch_of,
    "nccl": nccl_of,
    "python": of_software(lambda one: one.python),
    "driver": driver_of,
    "kernel": of_software(lambda one: one.kernel),
}
"""Reads a node's version by the name that the user gives."""


@rule(
    "DD106",
    "version-expected",
    Severity.ERROR,
    "A node does not run the expected version",
    group=CheckGroup.VERSIONS,
    needs=("software", "torch", "gpus"),
    reads="--expect-version, and the versions of torch, NCCL, Python, driver and kernel of every node",
)
def check_version_expected(fleet: Fleet) -> Answer:
    """Compare versions with those that the user expects."""
    if not fleet.expected:
        return skipped("no version is expected (--expect-version)")
    seen = {
        (expected, node.host): VERSION_OF[expected.name](node) for expected in fleet.expected for node in fleet.nodes
    }
    wrong = {key: version for key, version in seen.items() if version and not _holds(key[0], version)}
    found = [_problem(expected, version, hosts) for (expected, version), hosts in _by_version(wrong).items()]
    unread = sorted({expected.name for (expected, _), version in seen.items() if not version})
    if unread and not found:
        return unknown(f"the version of {', '.join(unread)} is unknown on some nodes")
    return judged(found, f"expected: {', '.join(one.text for one in fleet.expected)}")


def _by_version(wrong: dict[tuple[ExpectedVersion, str], str]) -> dict[tuple[ExpectedVersion, str], list[str]]:
    hosts: dict[tuple[ExpectedVersion, str], list[str]] = {}
    for (expected, host), version in wrong.items():
        hosts.setdefault((expected, version), []).append(host)
    return hosts


def _problem(expected: ExpectedVersion, version: str, hosts: Iterable[str]) -> Problem:
    return Problem(
        summary=f"{expected.name} is {version}, but {expected.text} is expected",
        fix=f"install a version of {expected.name} that meets {expected.text}, or correct --expect-version",
        hosts=tuple(hosts),
    )


def _holds(expected: ExpectedVersion, version: str) -> bool:
    """Return whether a version meets the expectation. If Python cannot read it, its leading numbers count."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        read = Version(version)
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", version)
        if numbers is None:
            return False
        read = Version(numbers[0])
    return SpecifierSet(expected.specifier).contains(read, prereleases=True)
