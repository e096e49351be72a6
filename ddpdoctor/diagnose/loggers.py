"""Says where the script of a job logged its training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.rank.loggers import read_loggers

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.loggers import Logger


def find_loggers(run_dir: Path) -> tuple[Logger, ...]:
    """Return each logger that the ranks of this host use, as the lowest rank that uses it does.

    Raises:
        UserError: the run folder is damaged.
    """
    return read_loggers(run_dir)
