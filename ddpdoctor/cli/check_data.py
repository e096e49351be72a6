"""``ddpdoctor check-data``: checks whether the data is sharded across ranks, and what each rank gets."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import OUTPUT, TIMEOUT, Option, ReportOptions, settings_of, typed
from ddpdoctor.cli.output import Outputs, check_outputs, deliver_check
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import now

if TYPE_CHECKING:
    from ddpdoctor.model.data import Drawn, RankDraws, SamplingPlan

EXAMPLES = (
    "Arithmetic only: ddpdoctor check-data --samples 455 --world-size 2 --batch-size 8\n"
    "  Your own loader: torchrun --nproc-per-node 2 -m ddpdoctor check-data --dataset package.module:make_loader"
)
# Options of the arithmetic that are not needed with a loader.
OF_THE_LOADER = ("samples", "batch_size", "drop_last", "sampler_drop_last", "no_sampler", "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ReportOptions):
    """Show which samples each rank gets, by arithmetic or from your own loader.

    With --samples, nothing is run. With --dataset, each rank makes its loader and draws indices, but loads no samples.
    """

    dataset: Annotated[
        str | None, Option(metavar="MODULE:FUNCTION", help="Your function that returns a DataLoader.")
    ] = None
    epochs: Annotated[int, Option(min=1, max=16, metavar="N", help="With --dataset: passes to check.")] = 2
    set_epoch: Annotated[
        bool, Option(names=("--set-epoch/--no-set-epoch",), help="With --dataset: call set_epoch before each pass.")
    ] = True
    samples: Annotated[int | None, Option(min=1, metavar="N", help="Number of samples; no loader is run.")] = None
    world_size: Annotated[int | None, Option(min=1, metavar="N", help="Number of ranks.")] = None
    batch_size: Annotated[int | None, Option(min=1, metavar="N", help="Batch size of each rank.  [default: 1]")] = None
    drop_last: Annotated[bool, Option(help="DataLoader(drop_last=True).")] = False
    sampler_drop_last: Annotated[bool, Option(help="DistributedSampler(drop_last=True).")] = False
    no_sampler: Annotated[bool, Option(help="Every rank reads all samples.")] = False
    split: Annotated[bool, Option(help="Split by samples[rank::world_size].")] = False
    shuffle: Annotated[bool, Option(names=("--shuffle/--no-shuffle",), help="Whether to shuffle.")] = True
    accumulation: Annotated[
        int, Option(names=("--grad-accumulation",), min=1, metavar="K", help="Batches per optimizer step.")
    ] = 1
    output: Annotated[Path | None, OUTPUT] = None
    timeout_s: Annotated[float, TIMEOUT.but(help="With --dataset: how long to wait.")] = typed("10m")


def run(options: Options) -> int:
    from ddpdoctor.diagnose.files import drawn_report, plan_report

    if options.dataset is None:
        plan = read_plan(options)
        outputs = check_outputs(options)
        return deliver_check(plan_report(plan, tuple(sys.argv)), outputs)
    for name in OF_THE_LOADER:
        if getattr(options, name):
            what = f"--{name.replace('_', '-')} cannot be used with --dataset, which reads your loader"
            raise UserError(what, help="Leave one of them out.")
    from ddpdoctor.collect.launch import seen_ranks
    from ddpdoctor.launch.own_ranks import end_with_parent, run_ranks
    from ddpdoctor.model.node import Launcher
    from ddpdoctor.probes.data import CheckDataOptions, run_rank

    # Use the loader on this rank, or start ranks that do.
    launch = seen_ranks(os.environ)
    if launch.rank == 0:
        check_outputs(options)
    if launch.launcher is Launcher.NONE and (options.world_size or 1) > 1:
        return run_ranks(sys.argv[1:], options.world_size or 1, os.environ)
    if launch.launcher is Launcher.OWN:
        end_with_parent(int(launch.run))
    elif launch.launcher is not Launcher.NONE and options.world_size not in {None, launch.world_size}:
        what = f"--world-size is {options.world_size}, but the launcher started {launch.world_size} ranks"
        raise UserError(what, help="Leave it out under a launcher.")
    started_at = now()

    def report(drawn: Drawn, ranks: tuple[RankDraws, ...]) -> int:
        made = drawn_report(drawn, ranks, tuple(sys.argv), started_at, options.accumulation)
        return deliver_check(made, settings_of(options, Outputs))

    return run_rank(settings_of(options, CheckDataOptions, function=options.dataset), launch, os.environ, report)


def read_plan(options: Options) -> SamplingPlan:
    """Return the settings of the arithmetic. Raises ``UserError`` for missing or conflicting options."""
    from ddpdoctor.model.data import SamplingPlan, Sharing

    if options.samples is None:
        raise UserError("check-data needs --samples, or --dataset", help=EXAMPLES)
    if options.world_size is None:
        raise UserError("--samples needs --world-size", help=EXAMPLES)
    if options.no_sampler and options.split:
        what = "use either --no-sampler or --split, not both"
        raise UserError(what, help="--no-sampler: every rank reads all samples. --split: samples[rank::world_size].")
    sharing = Sharing.NONE if options.no_sampler else Sharing.SPLIT if options.split else Sharing.SAMPLER
    if options.sampler_drop_last and sharing is not Sharing.SAMPLER:
        raise UserError("--sampler-drop-last needs a sampler", help="Leave one out.")
    return settings_of(options, SamplingPlan, batch_size=options.batch_size or 1, sharing=sharing)
