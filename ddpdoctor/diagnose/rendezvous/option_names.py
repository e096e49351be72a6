"""Replaces variable names in findings by the options that the user typed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.findings import Finding
    from ddpdoctor.model.launch import NodeOptions

_PREFIX = "PET_"


def as_typed(findings: Iterable[Finding], options: NodeOptions) -> tuple[Finding, ...]:
    """Return the findings with option names in place of the variables that the options set."""
    names = [name for name in options.variables() if name.startswith(_PREFIX)]
    if not names:
        return tuple(findings)
    pattern = re.compile(rf"(?:export )?\b({'|'.join(names)})\b")

    def typed(text: str) -> str:
        return pattern.sub(lambda found: option_of(found[1]), text)

    return tuple(
        replace(
            finding,
            summary=typed(finding.summary),
            evidence=tuple(typed(sentence) for sentence in finding.evidence),
            fix=typed(finding.fix),
        )
        for finding in findings
    )


def option_of(variable: str) -> str:
    """Return torchrun's option for a variable: PET_NODE_RANK is --node-rank."""
    return "--" + variable.removeprefix(_PREFIX).lower().replace("_", "-")
