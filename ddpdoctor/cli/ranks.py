"""Runs a command in several ranks: those that a launcher has started, or new ones on this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.cli.output import say, show_error
from ddpdoctor.collect.launch import seen_ranks
from ddpdoctor.launch.own_ranks import choose_ranks, end_with_parent, run_ranks
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.node import Launcher
from ddpdoctor.probes.loading import load_torch
from ddpdoctor.probes.ranks import run_wrong_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpdoctor.model.launch import Launch

Kind = TypeVar("Kind")
# Our choice: how long a rank with a wrong command line tries to reach rank 0 before it shows the error itself. Rank 0
# comes after it has imported torch, which takes half a minute on a cold network file system.
WRONG_LIMIT_S = 60.0


def run_in_ranks(
    nproc: int | None,
    env: Mapping[str, str],
    prepare: Callable[[Launch, int], Kind],
    take_part: Callable[[Launch, Kind], int],
) -> int:
    """Start ranks here, or run as a rank; ``prepare`` checks before they connect. Raises only without a launcher."""
    launch = seen_ranks(env)
    if launch.launcher is Launcher.NONE:
        count, note = (nproc, "") if nproc is not None else choose_ranks(env)
        prepared = prepare(launch, count)
        if note:
            say(sys.stderr, f"chose {note}")
        if count > 1:
            return run_ranks(sys.argv[1:], count, env)
        load_torch()
        return take_part(launch, prepared)
    if launch.launcher is Launcher.OWN:
        end_with_parent(int(launch.run))
    try:
        if nproc is not None and launch.launcher is not Launcher.OWN:
            raise UserError(  # noqa: TRY301 - all ranks report it once
                f"--nproc-per-node works only without a launcher, and a launcher started this rank {launch.rank}",
                help="Give the number of ranks to the launcher: torchrun --nproc-per-node, srun --ntasks-per-node.",
            )
        prepared = prepare(launch, launch.world_size)
        load_torch()
    except UserError as error:
        return run_wrong_rank(launch, env, error, WRONG_LIMIT_S, show_error)
    return take_part(launch, prepared)


def refuse(error: UserError) -> int | None:
    """Report a wrong command line once for all ranks, and return the status, or None without a launcher."""
    launch = seen_ranks(os.environ)
    if launch.launcher is Launcher.NONE:
        return None
    return run_wrong_rank(launch, os.environ, error, WRONG_LIMIT_S, show_error)
