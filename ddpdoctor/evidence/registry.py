"""All readers, in the order in which they are asked."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.evidence.reader import DocumentReader, LineReader


@cache
def document_readers() -> tuple[DocumentReader, ...]:
    """Return the readers of whole files. The first that recognizes a file reads it."""
    from ddpdoctor.evidence.attached import AttachReader
    from ddpdoctor.evidence.flight import FlightJsonReader, FlightPickleReader
    from ddpdoctor.evidence.machines import MachineFactsReader, NvidiaSmiReader
    from ddpdoctor.evidence.ras import RasJsonReader
    from ddpdoctor.evidence.stacks import JsonStackReader, StackReader
    from ddpdoctor.evidence.torchrun import ErrorFileReader

    return (
        FlightPickleReader(), AttachReader(), MachineFactsReader(), FlightJsonReader(), RasJsonReader(),
        NvidiaSmiReader(), JsonStackReader(), StackReader(), ErrorFileReader(),
    )  # fmt: skip


def line_readers() -> tuple[LineReader, ...]:
    """Return new readers for one stream of lines. All of them get all lines.

    The reader of launches is the last: what the others held back until a launch belongs before it.
    """
    from ddpdoctor.evidence.collective_errors import CollectiveErrorReader
    from ddpdoctor.evidence.errors import CrashReader
    from ddpdoctor.evidence.frameworks import FrameworkReader, HorovodReader, LaunchReader
    from ddpdoctor.evidence.machines import KernelReader, KubernetesReader, NcclTestsReader
    from ddpdoctor.evidence.nccl_log import NcclLogReader
    from ddpdoctor.evidence.ras import RasReader
    from ddpdoctor.evidence.slurm import SacctReader, SlurmReader
    from ddpdoctor.evidence.stacks import FaulthandlerReader
    from ddpdoctor.evidence.torchrun import TorchrunReader
    from ddpdoctor.evidence.tracebacks import TracebackReader
    from ddpdoctor.evidence.watchdog import WatchdogReader

    return (
        WatchdogReader(), CollectiveErrorReader(), TracebackReader(), CrashReader(), TorchrunReader(), NcclLogReader(),
        RasReader(), SlurmReader(), SacctReader(), KernelReader(), KubernetesReader(), FrameworkReader(),
        HorovodReader(), FaulthandlerReader(), NcclTestsReader(), LaunchReader(),
    )  # fmt: skip
