"""torchrun's options and whether each takes a value, without the seconds that importing torch costs.

Taken from ``torch/distributed/run.py`` of torch 2.6 to 2.13. For options of a newer torch, torch itself is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import safe_flags
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

ASK_TIMEOUT_S = 60.0
"""Importing torch takes a second or two; a cold network file system may need a minute."""

_WITH_VALUE = (
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "-r",
    "--redirects",
    "-t",
    "--tee",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
)
_FLAGS = ("--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank")

TORCHRUN_OPTIONS: Mapping[str, bool] = MappingProxyType(dict.fromkeys(_WITH_VALUE, True) | dict.fromkeys(_FLAGS, False))
"""Each option, written with dashes, and whether it takes a value."""

_ASK_TORCH = """
import json
from torch.distributed.run import get_args_parser
actions = get_args_parser()._actions
print(json.dumps({name: action.nargs != 0 for action in actions for name in action.option_strings}))
"""


@lru_cache(maxsize=1)
def ask_torchrun() -> Mapping[str, bool]:
    """Ask the installed torch, in a separate process, for its options and whether each takes a value.

    Raises ``UserError`` if torch cannot be imported or does not answer in time.
    """
    command = [sys.executable, *safe_flags(), "-c", _ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True)
        answer: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UserError(
            "cannot read torchrun's options: torch.distributed.run gave no answer",
            help=f"Run `{sys.executable} -m torch.distributed.run --help` to see why.",
        ) from error
    return {canonical(name): takes_value for name, takes_value in answer.items()}


def canonical(option: str) -> str:
    """Write a long option with dashes: ``--nproc_per_node`` as ``--nproc-per-node``."""
    return option.replace("_", "-") if option.startswith("--") else option
