"""The final settings of ``wrap``, from the command line, the environment and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.recorder.settings import RecorderSettings

OnHang = Literal["auto", "kill", "report"]
"""When to stop a job that hangs: once it can never continue (auto), at the first report (kill), never (report)."""
DebugLevel = Literal["DETAIL", "INFO", "OFF"]
ChosenLevel = Literal["AUTO", "DETAIL", "INFO", "OFF"]
"""AUTO means DETAIL if the job turns out to use only Gloo, and OFF if it uses NCCL or another backend."""
OutputFormat = Literal["text", "json"]
SavedFormat = Literal["text", "json", "junit", "github", "sarif", "markdown", "html", "csv", "nccl-tests"]
"""The last two apply only to reports of `allreduce-bench`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """The settings of one wrapped job."""

    hang_timeout_s: float
    on_hang: OnHang
    debug_level: ChosenLevel | None
    """None keeps the value of ``TORCH_DISTRIBUTED_DEBUG`` in the environment."""
    report_dir: Path
    """The run folder, which exists, is private and is known to be writable."""
    report_file: Path
    """The file for the report: report.json in the run folder, or node-N.json above it on every node but the first."""
    placement: Placement
    """The place of this ``wrap`` in its job."""
    html: Path | None = None
    """The file for the report as a page. Only the node that writes report.json writes it."""
    format: OutputFormat
    quiet: bool
    ignore: tuple[str, ...]
    """Codes of rules whose findings are left out."""
    ranks: RecorderSettings
    """The settings of each rank's recorder."""
    allow_different: tuple[str, ...]
    """Name patterns of tensors that may differ between ranks."""
    speed: bool
    """Whether to say where the time of a step goes, and what to change."""
    torchrun_args: tuple[str, ...]
    """Options for torchrun: first those that ddpdoctor chose (number of ranks, nodes), then the user's in order."""
    script: str
    """The script, module or command to run."""
    is_module: bool
    is_command: bool
    """Whether ``script`` starts the ranks itself, or is the only rank; it then runs without torchrun."""
    no_python: bool
    script_args: tuple[str, ...]
    nproc_note: str | None
    """A sentence on the chosen number of ranks and how to change it, or None if the user chose."""
    command: tuple[str, ...]
    """The full command line as typed."""
    entry: str = "wrap"
    """What started the watch, as ``Run.entry``."""
