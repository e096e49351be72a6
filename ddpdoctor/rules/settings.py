"""What a variable of NCCL's is for a process: from its environment, else from one of NCCL's own files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.reading import known

if TYPE_CHECKING:
    from ddpdoctor.model.node import Node, Process

NCCL_CONF = "nccl-conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and where it comes from."""

    name: str
    value: str
    path: str | None = None
    """The file; None: the environment."""

    def __str__(self) -> str:
        return f"{self.name}={self.value}" + (f" in {self.path}" if self.path else "")

    @property
    def kind(self) -> str | None:
        """The kind of what is wrong with the value: whatever stands in one of NCCL's files is ``nccl-conf``."""
        return NCCL_CONF if self.path else None

    @property
    def removal(self) -> str:
        """How to take it away."""
        return f"remove {self.name} from {self.path}" if self.path else f"unset {self.name}"

    @property
    def number(self) -> int | None:
        """The value as NCCL reads a whole number; None where it is none."""
        try:
            return int(self.value.strip(), 0)
        except ValueError:
            return None


def find_setting(node: Node, process: Process, name: str) -> Setting | None:
    """Return what NCCL would read; the environment wins over files. None where it is not set, or to nothing."""
    if name in process.variables:
        value = process.variables[name]
        return Setting(name=name, value=value) if value else None
    for file in known(node.conf_files) or ():
        if file.variables.get(name) and name not in (*file.hidden_by_env, *file.hidden_by_file):
            return Setting(name=name, value=file.variables[name], path=file.path)
    return None
