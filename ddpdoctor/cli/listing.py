"""The list of commands for ``ddpdoctor --help``. It imports neither the commands nor Typer."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

BEFORE_A_JOB = "Before a job"
RUN_A_JOB = "Run a job"
HUNG_OR_DEAD = "A job that hangs or died"
SAVED_RUN = "Look at a saved run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A command in the list of ``ddpdoctor --help``."""

    panel: str
    summary: str
    usage: str = "[OPTIONS]"


LAUNCH = "[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]... | [OPTIONS] -- COMMAND [ARGS]..."
VERBS = {
    "check-env": Listed(panel=BEFORE_A_JOB, summary="Check versions, variables, network and GPUs."),
    "check-rendezvous": Listed(panel=BEFORE_A_JOB, summary="Check that the nodes of a job can meet and start."),
    "allreduce-bench": Listed(panel=BEFORE_A_JOB, summary="Measure collectives; find a slow rank, link or host."),
    "check-consistency": Listed(panel=BEFORE_A_JOB, summary="Check that all ranks train the same model."),
    "check-data": Listed(panel=BEFORE_A_JOB, summary="Check how the samples are split between ranks."),
    "check-checkpoint": Listed(panel=BEFORE_A_JOB, summary="Check that checkpoints are complete and would load."),
    "wrap": Listed(panel=RUN_A_JOB, summary="Run a training script; explain a hang or a crash.", usage=LAUNCH),
    "tune": Listed(panel=RUN_A_JOB, summary="Try DDP settings; name the one that saves most time.", usage=LAUNCH),
    "demo": Listed(panel=RUN_A_JOB, summary="Run a small job with a fault and diagnose it."),
    "config": Listed(panel=RUN_A_JOB, summary="Show the options that files and variables set."),
    "status": Listed(panel=RUN_A_JOB, summary="Show what a job under wrap does right now."),
    "attach": Listed(panel=HUNG_OR_DEAD, summary="Find out why a running job makes no progress."),
    "analyze": Listed(panel=HUNG_OR_DEAD, summary="Find the cause in logs, dumps and stacks."),
    "report": Listed(panel=SAVED_RUN, summary="Show the report of a saved run."),
    "history": Listed(panel=SAVED_RUN, summary="Show the restarts of a job and what they cost."),
    "explain": Listed(panel=SAVED_RUN, summary="Explain a code or an error message."),
    "diff": Listed(panel=SAVED_RUN, summary="Say what differs between two runs."),
    "bundle": Listed(panel=SAVED_RUN, summary="Pack a report without secrets, for an issue."),
}
LAUNCHING = frozenset({"wrap", "tune"})
"""Commands that start a job: a script or a command, and torchrun's options, follow their own options."""


def load_verb(name: str) -> Any:
    """Return a command's module.

    The module has ``Options``, a dataclass whose docstring is the help text, and ``run``, which takes an ``Options``
    and returns the exit status.
    """
    return import_module(f"ddpdoctor.cli.{name.replace('-', '_')}")
