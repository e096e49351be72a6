"""Says of options what rules say of the variables that stand for them: a user knows what was typed."""

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
    """Return findings in which variables that options of this command stand for have the options' names."""
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
    """Return the option that torchrun reads a variable in the place of: PET_NODE_RANK is --node-rank."""
    return "--" + variable.removeprefix(_PREFIX).lower().replace("_", "-")
