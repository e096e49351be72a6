"""The value of an NCCL variable for a process: from its environment, else from one of NCCL's own files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.reading import known
from ddpdoctor.rules.variable_values import find_number

if TYPE_CHECKING:
    from ddpdoctor.model.node import Node, NodeProcess

NCCL_CONF = "nccl-conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and its source."""

    name: str
    value: str
    path: str | None = None
    """The file, or None for the environment."""

    def __str__(self) -> str:
        return f"{self.name}={self.value}" + (f" in {self.path}" if self.path else "")

    @property
    def kind(self) -> str | None:
        """The kind of problem that a wrong value is: ``nccl-conf`` if it comes from one of NCCL's files, else None."""
        return NCCL_CONF if self.path else None

    @property
    def removal(self) -> str:
        """How to remove it."""
        return f"remove {self.name} from {self.path}" if self.path else f"unset {self.name}"

    @property
    def number(self) -> int | None:
        """The number that NCCL reads: the one that the value begins with, or None if it begins with none."""
        return find_number(self.value)


def find_setting(node: Node, process: NodeProcess, name: str) -> Setting | None:
    """Return what NCCL would read, or None if it is not set or empty; the environment wins over files."""
    if name in process.variables:
        value = process.variables[name]
        return Setting(name=name, value=value) if value else None
    for file in known(node.conf_files) or ():
        if file.variables.get(name) and name not in (*file.hidden_by_env, *file.hidden_by_file):
            return Setting(name=name, value=file.variables[name], path=file.path)
    return None
