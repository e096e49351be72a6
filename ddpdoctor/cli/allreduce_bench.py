"""``ddpdoctor allreduce-bench``: measures the network, rates it, and finds what is slow."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ddpdoctor.cli import options as shared
from ddpdoctor.cli.options import COMPARE, Backend, FailOn, Option, settings_of, typed
from ddpdoctor.cli.output import Outputs, ShownProgress, check_outputs, deliver, severity_of, show_error
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import now

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.cli.output import ShownProgress
    from ddpdoctor.diagnose.bandwidth import BenchReportOptions
    from ddpdoctor.model.bandwidth import Bench, BenchSettings
    from ddpdoctor.model.launch import Launch

ALL = "all"
MODES = {"latency": ("latency",), "throughput": ("throughput",), "both": ("latency", "throughput")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Measure collectives between ranks, and find a slow rank, link or host.

    Runs in the ranks of torchrun or srun, or starts ranks on this machine. Sizes and bandwidths are as in nccl-tests:
    MiB is 2**20 bytes, GB/s is 1e9 bytes per second.
    """

    collective: Annotated[
        tuple[str, ...], Option(metavar="NAME", help="Collectives, or all.  [default: all_reduce]")
    ] = ()
    min_size_bytes: Annotated[
        int, Option(names=("--min-size",), metavar="SIZE", parse=shared.parse_size, help="Smallest size.")
    ] = typed("1KiB")
    max_size_bytes: Annotated[
        int, Option(names=("--max-size",), metavar="SIZE", parse=shared.parse_size, help="Largest size.")
    ] = typed("1GiB")
    factor: Annotated[int, Option(min=2, metavar="N", help="Each size is N times the one before.")] = 2
    dtype: Annotated[tuple[str, ...], Option(metavar="NAME", help="float32, bfloat16, ...  [default: float32]")] = ()
    op: Annotated[str, Option(metavar="NAME", help="sum, prod, min, max or avg.")] = "sum"
    mode: Annotated[Literal["latency", "throughput", "both"], Option(metavar="MODE", help="Timing:")] = "both"
    in_place: Annotated[bool, Option(help="Reduce in place.")] = False
    cold: Annotated[bool, Option(help="Keep the buffers out of the CPU cache.")] = False
    backend: Annotated[Backend | None, shared.BACKEND] = None
    nproc_per_node: Annotated[int | None, shared.NPROC_PER_NODE] = None
    budget_s: Annotated[
        float, Option(names=("--budget",), metavar="DURATION", parse=shared.parse_duration, help="Time to spend.")
    ] = typed("30s")
    iterations: Annotated[
        int | None, Option(names=("--iters",), min=1, metavar="N", help="Timed calls per case.  [default: by --budget]")
    ] = None
    warmup: Annotated[
        int | None, Option(min=0, metavar="N", help="Calls before the timed ones.  [default: by --budget]")
    ] = None
    pairs: Annotated[bool, Option(help="Measure each pair of ranks; find a slow rank or link.")] = False
    by_node: Annotated[bool, Option(help="Measure each pair of hosts; find a slow host.")] = False
    compare: Annotated[Path | None, shared.SAVED.but(help="A saved run to compare with.")] = None
    fail_below: Annotated[float | None, Option(
        panel=COMPARE, metavar="SHARE", parse=shared.parse_share,
        help="Least share of the saved bandwidth, such as 90%.",
    )] = None  # fmt: skip
    expect_gb_s: Annotated[float | None, Option(
        names=("--expect",), panel=COMPARE, metavar="BANDWIDTH", parse=shared.parse_bandwidth,
        help="Least bus bandwidth, such as 460GB/s.",
    )] = None  # fmt: skip
    reference: Annotated[Literal["auto", "none"], shared.REFERENCE.but(help="Compare with known hardware.")] = "auto"
    model_size: Annotated[
        int | None, Option(metavar="N", parse=shared.parse_count, help="Parameters of your model (7B): what DDP costs.")
    ] = None
    format: Annotated[Literal["text", "json", "csv", "markdown", "nccl-tests"], shared.FORMAT] = "text"
    output: Annotated[Path | None, shared.OUTPUT] = None
    plot: Annotated[Path | None, shared.PLOT] = None
    report_dir: Annotated[Path | None, shared.REPORT_DIR] = None
    fail_on: Annotated[FailOn, shared.FAIL_ON] = "error"
    ignore: Annotated[tuple[str, ...], shared.IGNORE] = ()
    hang_timeout_s: Annotated[float, shared.HANG_TIMEOUT.but(help="No progress this long is a hang.")] = typed("60s")
    timeout_s: Annotated[float, shared.TIMEOUT.but(help="How long to wait for the slowest rank.")] = typed("60s")


def run(options: Options) -> int:
    from ddpdoctor.cli.ranks import run_in_ranks

    env = dict(os.environ)
    return run_in_ranks(options.nproc_per_node, env, partial(_bench_setup, options), partial(_take_part, options, env))


def _bench_setup(options: Options, launch: Launch, world_size: int) -> tuple[BenchSettings, BenchReportOptions]:
    from ddpdoctor.diagnose.bandwidth import BenchReportOptions

    settings = read_settings(options)
    if options.fail_below is not None and options.compare is None:
        raise UserError("--fail-below needs --compare", help="Give the saved run: --compare report.json")
    wanted = settings_of(
        options, BenchReportOptions, command=tuple(sys.argv), started_at=now(),
        use_reference=options.reference == "auto",
    )  # fmt: skip
    if launch.rank != 0:
        return settings, wanted
    check_outputs(options)
    return settings, replace(wanted, baseline=read_compared(options.compare, world_size))


def read_settings(options: Options) -> BenchSettings:
    """Return the settings. The backend may still be open. Raises ``UserError``, which lists what is possible."""
    from ddpdoctor.model.bandwidth import BenchSettings, Collective, Mode
    from ddpdoctor.model.words import format_size
    from ddpdoctor.probes.bandwidth.plan import DTYPES, REDOPS, check_possible
    from ddpdoctor.probes.ranks import AUTO

    smallest, largest = options.min_size_bytes, options.max_size_bytes
    if smallest > largest:
        what = f"--min-size {format_size(smallest)} is above --max-size {format_size(largest)}"
        raise UserError(what, help="Give a --min-size that is not above --max-size.")
    names = [collective.value for collective in Collective]
    chosen = _choose(options.collective, (*names, ALL), "--collective") or (Collective.ALL_REDUCE.value,)
    collectives = tuple(Collective) if ALL in chosen else tuple(map(Collective, chosen))
    dtypes = _choose(options.dtype, DTYPES, "--dtype") or ("float32",)
    (redop,), modes = _choose((options.op.lower(),), REDOPS, "--op"), tuple(map(Mode, MODES[options.mode]))
    own = {"collectives": collectives, "dtypes": dtypes, "redop": redop, "modes": modes}
    settings = settings_of(options, BenchSettings, **own, backend=options.backend or AUTO)
    if options.backend is not None:
        check_possible(settings)
    return settings


def read_compared(path: Path | None, world_size: int) -> Any:
    """Return the saved run to compare with, if any. Raises ``UserError``, also for another number of ranks."""
    from ddpdoctor.cli.report import read_run
    from ddpdoctor.diagnose.bandwidth import check_ranks, read_baseline

    if path is None:
        return None
    baseline = read_baseline(read_run(path), str(path))
    check_ranks(baseline, world_size)
    return baseline


def _choose(given: tuple[str, ...], possible: Sequence[str] | Mapping[str, int], option: str) -> tuple[str, ...]:
    """Return the names from repeated or comma-separated options, each once. Raises ``UserError`` for unknown names."""
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    for name in names:
        if name not in possible:
            raise UserError(f"{option} {name} is not known", help=f"Known: {', '.join(possible)}.")
    if given and not names:
        raise UserError(f"{option} is empty", help=f"Known: {', '.join(possible)}.")
    return tuple(dict.fromkeys(names))


def _take_part(
    options: Options, env: Mapping[str, str], launch: Launch, prepared: tuple[BenchSettings, BenchReportOptions]
) -> int:
    from ddpdoctor.diagnose.machines import MachineReader
    from ddpdoctor.probes.bandwidth.session import run_rank

    settings, wanted = prepared
    reader = MachineReader(launch, env)
    with ShownProgress(sys.stderr, wanted=launch.rank == 0) as progress:

        def report(bench: Bench) -> int:
            """Judge, save and show the bench, on the reporting rank; return the exit status."""
            from ddpdoctor.diagnose.bandwidth import build_report, exit_status

            progress.stop()
            made = deliver(build_report(bench, replace(wanted, fleet=reader.fleet)), settings_of(options, Outputs))
            return exit_status(made, severity_of(options.fail_on))

        return run_rank(
            launch, env, settings, options.timeout_s, read_machines=reader, report=report, show_error=show_error,
            progress=progress.show,
        )  # fmt: skip
