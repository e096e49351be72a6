"""Runs `allreduce-bench` on real ranks and reads what came of it."""

import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from tests.scenarios.running import SCHEMA, begin, free_port

BENCH = (sys.executable, "-m", "ddpdoctor", "allreduce-bench")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
QUICK = ("--max-size", "4KiB", "--iters", "3", "--warmup", "1")
"""Three sizes, and as few calls as do."""
ROOT = Path(__file__).parents[3]
FAULTS = Path(__file__).with_name("faults")
"""A rank that has this folder on PYTHONPATH does what a variable says."""
LIMIT_S = 250


@dataclass(frozen=True)
class Ran:
    """A command that was run: its exit status and its streams."""

    status: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        """The one report on stdout, in the form that every report has."""
        report = json.loads(self.stdout)
        jsonschema.validate(report, SCHEMA)
        return dict(report)


def start(*command: str, cwd: Path | None = None, **env: str) -> Any:
    """Start a command in a session of its own, outside any launcher."""
    search = os.pathsep.join(filter(None, (env.pop("PYTHONPATH", ""), str(ROOT))))
    return begin(*command, cwd=cwd, PYTHONPATH=search, **env)


def finish(process: Any) -> Ran:
    """Wait for a command. Whatever still lives of its session in the end is killed."""
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Ran(process.returncode, stdout, stderr)


def bench(*options: str, ranks: int = 2, cwd: Path | None = None, **env: str) -> Ran:
    """Run a bench that starts its ranks itself."""
    return finish(start(*BENCH, "--nproc-per-node", str(ranks), *options, cwd=cwd, **env))


def torchrun(*options: str, ranks: int = 2, cwd: Path | None = None, **env: str) -> Ran:
    """Run a bench under torchrun."""
    launcher = (*TORCHRUN, f"--nproc-per-node={ranks}", f"--master-port={free_port()}", "-m", "ddpdoctor")
    return finish(start(*launcher, "allreduce-bench", *options, cwd=cwd, **env))


def by_hand(*ranks: tuple[str, ...], **env: str) -> list[Ran]:
    """Run a bench of ranks that only have RANK and the like set, each with options of its own."""
    common = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
    started = [start(*BENCH, *options, RANK=str(rank), **common) for rank, options in enumerate(ranks)]
    return [finish(process) for process in started]
