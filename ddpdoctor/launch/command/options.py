"""What ``wrap`` was asked for, once the command line, the environment and the machine have had their say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.recorder.settings import Settings

OnHang = Literal["auto", "kill", "report"]
"""When a job that hangs is stopped: once it can never go on, at the first report, never."""
DebugLevel = Literal["DETAIL", "INFO", "OFF"]
ChosenLevel = Literal["AUTO", "DETAIL", "INFO", "OFF"]
"""AUTO: DETAIL where the job turns out to use Gloo alone, OFF where it uses NCCL or another backend."""
OutputFormat = Literal["text", "json"]
SavedFormat = Literal["text", "json", "junit", "markdown", "csv", "nccl-tests"]
"""The last two hold for reports of `allreduce-bench` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """The settings of one wrapped job."""

    hang_timeout_s: float
    on_hang: OnHang
    debug_level: ChosenLevel | None
    """None where the value that ``TORCH_DISTRIBUTED_DEBUG`` has in the environment stays."""
    report_dir: Path
    """The run folder: made, private, and known to be writable."""
    report_file: Path
    """What the report becomes: report.json of the run folder, or node-N.json above it on every node but the first."""
    placement: Placement
    """Where this ``wrap`` stands among those of its job."""
    format: OutputFormat
    quiet: bool
    ignore: tuple[str, ...]
    """Codes of rules whose findings are left out."""
    ranks: Settings
    """What the recorder of each rank is told."""
    allow_different: tuple[str, ...]
    """Patterns of names of tensors that may differ between ranks."""
    torchrun_args: tuple[str, ...]
    """Options for torchrun in the user's order, after those that ddpdoctor chose: number of ranks, nodes."""
    script: str
    """The script, the module, or the command that is run."""
    is_module: bool
    is_command: bool
    """``script`` starts the ranks itself, or is the one rank; torchrun is not put in front of it."""
    no_python: bool
    script_args: tuple[str, ...]
    nproc_note: str | None
    """What was chosen as number of ranks and how to choose otherwise; None where the user chose."""
    command: tuple[str, ...]
    """The full command line as it was typed."""
