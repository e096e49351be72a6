"""Writes run.json: what was started, when and how. It is the first file in a run folder, and marks it as one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.proc import read_process
from ddpdoctor.launch.command.placement import Style
from ddpdoctor.launch.command.torchrun_nodes import TorchrunSettings
from ddpdoctor.model.codec import encode
from ddpdoctor.model.facts import RECORD_NAME, RecordPlace, Run
from ddpdoctor.recorder.storage.files import write_whole
from ddpdoctor.recorder.storage.secrets import hide_secrets

if TYPE_CHECKING:
    from ddpdoctor.launch.command.options import WrapOptions

STORED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG",
    "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "NODE_RANK", "OMP_NUM_THREADS", "RANK",
    "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_RESTART_COUNT", "TORCH_DISTRIBUTED_DEBUG",
    "WORLD_SIZE",
)  # fmt: skip
"""The only environment variables that a run folder holds."""


def write_run_file(folder: Path, options: WrapOptions, started_at: str, launched_ns: int) -> None:
    """Write run.json: what was started, when and how."""
    level = options.debug_level or os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    environment = {**os.environ, **dict(options.placement.variables)}
    run = Run(
        command=hide_secrets(options.command),
        started_at=started_at,
        launched_ns=launched_ns,
        hang_timeout_s=options.hang_timeout_s,
        debug_level=level.upper(),
        check_every=options.ranks.check_every,
        allow_different=options.allow_different,
        speed=options.speed,
        host=socket.gethostname(),
        torch_version=_torch_version(),
        environment={name: environment[name] for name in STORED_VARIABLES if name in environment},
        entry=options.entry,
        launcher=options.placement.style.value,
        run_dir="" if folder == options.report_dir.resolve() else str(options.report_dir.resolve()),
        watcher_pid=os.getpid(),
        watcher_ticks=_own_ticks(),
        **_shape(options),
    )
    write_whole(folder / "run.json", json.dumps(encode(run), indent=1))


def write_record_place(run_dir: Path, folder: Path) -> None:
    """Say in the run folder where the record is while the job runs, for `ddpdoctor status`. A full disk is ignored."""
    place = RecordPlace(host=socket.gethostname(), folder=str(folder))
    with contextlib.suppress(OSError):
        write_whole(run_dir / RECORD_NAME, json.dumps(encode(place)))


def _own_ticks() -> int | None:
    own = read_process(os.getpid())
    return own.start_ticks if own is not None else None


def _shape(options: WrapOptions) -> dict[str, Any]:
    """Return how many ranks are requested, here and in all. For a command that is unknown until it starts them."""
    placement = options.placement
    if placement.style is Style.TORCHRUN:
        return launch_shape(TorchrunSettings(options.torchrun_args, os.environ))
    if placement.style is Style.RANK:
        return {
            "nproc": 1, "nnodes": placement.nodes, "node_rank": placement.number, "world_size": placement.expected,
        }  # fmt: skip
    return {}


def launch_shape(torchrun: TorchrunSettings) -> dict[str, int | None]:
    """Return nproc, nnodes and node_rank from torchrun's settings, each None if it is not a number."""
    nnodes = torchrun.nnodes if torchrun.text("--nnodes") else (1, 1)
    return {
        "nproc": torchrun.number("--nproc-per-node"),
        "nnodes": nnodes[0] if nnodes else None,
        "node_rank": torchrun.number("--node-rank"),
    }


def _torch_version() -> str | None:
    """Read torch's version from its file: importing torch takes a second, and importlib.metadata is slow too."""
    found = find_spec("torch")
    try:
        text = (Path(found.origin).parent / "version.py").read_text() if found and found.origin else ""
    except (OSError, UnicodeDecodeError):
        return None
    said = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return said[1] if said else None
