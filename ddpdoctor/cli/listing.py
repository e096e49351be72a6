"""The list of commands for ``ddpdoctor --help``. It imports neither the commands nor Typer."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

RUN_A_JOB = "Run a job and find out what is wrong"
BEFORE_A_JOB = "Before a job"
MODEL_AND_DATA = "Model, data and checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A command in the list of ``ddpdoctor --help``."""

    panel: str
    summary: str
    usage: str = "[OPTIONS]"


VERBS = {
    "wrap": Listed(
        panel=RUN_A_JOB, summary="Run a training script under watch.",
        usage="[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]... | [OPTIONS] -- COMMAND [ARGS]...",
    ),
    "tune": Listed(
        panel=RUN_A_JOB, summary="Try settings in one throwaway run, and say which line to change.",
        usage="[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]... | [OPTIONS] -- COMMAND [ARGS]...",
    ),
    "status": Listed(panel=RUN_A_JOB, summary="Show what a job under wrap does right now."),
    "attach": Listed(panel=RUN_A_JOB, summary="Find out why a job that runs now does not go on."),
    "analyze": Listed(
        panel=RUN_A_JOB, summary="Find out from logs, dumps and stacks what went wrong.",
    ),
    "report": Listed(panel=RUN_A_JOB, summary="Show the report of a saved run again."),
    "history": Listed(panel=RUN_A_JOB, summary="Show how a job that restarts fared, start by start."),
    "explain": Listed(panel=RUN_A_JOB, summary="Explain a code, such as DD601."),
    "demo": Listed(panel=RUN_A_JOB, summary="Diagnose a tiny job with a fault, to see how it looks."),
    "check-env": Listed(panel=BEFORE_A_JOB, summary="Check whether machines are fit to train."),
    "check-rendezvous": Listed(panel=BEFORE_A_JOB, summary="Check whether a job over several nodes would start."),
    "allreduce-bench": Listed(
        panel=BEFORE_A_JOB, summary="Measure collectives, and name what is slow."
    ),
    "check-consistency": Listed(
        panel=MODEL_AND_DATA, summary="Check whether all replicas stay one model."
    ),
    "check-data": Listed(panel=MODEL_AND_DATA, summary="Check how data is split between ranks."),
    "check-checkpoint": Listed(panel=MODEL_AND_DATA, summary="Check whether a checkpoint is whole and would load."),
}  # fmt: skip
LAUNCHING = frozenset({"wrap", "tune"})
"""Commands that start a job: a script or a command, and torchrun's options, follow their own options."""


def load_verb(name: str) -> Any:
    """Return a command's module.

    The module has ``Options``, a dataclass whose docstring is the help text, and ``run``, which takes an ``Options``
    and returns the exit status.
    """
    return import_module(f"ddpdoctor.cli.{name.replace('-', '_')}")
