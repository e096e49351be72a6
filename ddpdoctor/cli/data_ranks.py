"""From `check-data --dataset` to its exit status: start ranks, or be one; report what came of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.cli.durations import parse_duration
from ddpdoctor.cli.showing import Shown, show_check
from ddpdoctor.diagnose.bandwidth_machines import find_launch
from ddpdoctor.diagnose.check_data import drawn_report
from ddpdoctor.diagnose.check_env import now
from ddpdoctor.launch.processes.ranks import end_with_parent, run_ranks
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.node import Launcher
from ddpdoctor.probes.data.session import Wanted, run_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.probes.data.session import Heard


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderAsked:
    """The command line as it was typed, as far as it is about the user's own loader."""

    function: str
    epochs: int
    set_epoch: bool
    accumulation: int
    world_size: int | None
    timeout: str
    command: tuple[str, ...]
    shown: Shown


def run(asked: LoaderAsked, env: Mapping[str, str]) -> int:
    """Ask the loader on this rank, or start ranks that do; return the exit status. Raises ``UserError``."""
    launch = find_launch(env)
    wanted = Wanted(
        function=asked.function,
        epochs=asked.epochs,
        set_epoch=asked.set_epoch,
        timeout_s=parse_duration(asked.timeout, "--timeout"),
    )
    if launch.launcher is Launcher.NONE and (asked.world_size or 1) > 1:
        return run_ranks(sys.argv[1:], asked.world_size or 1, env)
    if launch.launcher is Launcher.OWN:
        end_with_parent(int(launch.run))
    elif launch.launcher is not Launcher.NONE and asked.world_size not in {None, launch.world_size}:
        raise UserError(
            f"--world-size is {asked.world_size}, and the launcher has started {launch.world_size} ranks",
            help="Leave it out under a launcher.",
        )
    started_at = now()

    def report(heard: Heard) -> int:
        made = drawn_report(heard.drawn, heard.told, asked.command, started_at, asked.accumulation)
        return show_check(made, asked.shown)

    return run_rank(wanted, launch, env, report)
