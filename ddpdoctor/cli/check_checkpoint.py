"""``ddpdoctor check-checkpoint``: checks whether a checkpoint is intact and would load into the model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ddpdoctor.cli.options import MODEL, OUTPUT, Argument, Option, ReportOptions, settings_of
from ddpdoctor.model.findings import now


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ReportOptions):
    """Check checkpoints: damage, missing parts, names and shapes, NaN.

    No code in a file is executed. A file may be larger than memory.
    """

    paths: Annotated[tuple[Path, ...], Argument(metavar="FILE", help="Checkpoint files or folders.")]
    model: Annotated[str | None, MODEL.but(help="Function that returns the model to load into.")] = None
    same: Annotated[bool, Option(help="The files must be copies of one checkpoint.")] = False
    quick: Annotated[bool, Option(help="Read only the index, not the values.")] = False
    output: Annotated[Path | None, OUTPUT] = None


def run(options: Options) -> int:
    from ddpdoctor.cli.output import ShownProgress, check_outputs, deliver_check
    from ddpdoctor.diagnose.files import checkpoint_report
    from ddpdoctor.probes.checkpoints import CheckpointOptions, read_checkpoints

    outputs = check_outputs(options)
    started_at = now()
    with ShownProgress(sys.stderr, wanted=True) as progress:
        settings = settings_of(options, CheckpointOptions)
        found = read_checkpoints(settings, lambda path: progress.show(f"reading {path}", 0.0, None))
    return deliver_check(checkpoint_report(found, tuple(sys.argv), started_at), outputs)
