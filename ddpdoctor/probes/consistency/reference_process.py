"""Rank 0's side of the process that computes each step on the whole batch: starts it and asks it.

Its messages are lines of JSON.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddpdoctor
from ddpdoctor.collect.bounded import safe_flags
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.trial import OneProcess, ReferenceStep
from ddpdoctor.probes.consistency.losses import FAILED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.trial import ReferenceStep, TrialSettings
    from ddpdoctor.probes.consistency.step_records import StepRecord

MODULE = "ddpdoctor.probes.consistency.alone"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
"""What torchrun sets for a job of one process. LOCAL_RANK is kept because it chooses the GPU."""
LIMIT_FACTOR = 2
"""The user's step limit is multiplied by this for each pass: one process does the work of all ranks four times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStart:
    """The first message: what all steps have in common."""

    settings: TrialSettings
    world_size: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A step to compute. ``path`` is a file with the state before the step and the gradients that DDP left."""

    step: int
    path: str
    batches: tuple[str, ...]
    """The digest of each rank's batch, in rank order."""
    losses: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceAnswer:
    """How the gradients compare. If they cannot be compared, ``step`` is None and ``problem`` says why."""

    step: ReferenceStep | None = None
    float64: bool = True
    batchnorm: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    problem: str = ""


class ReferenceProcess:
    """A separate process, so that the user's code sees a job of one rank in every respect."""

    def __init__(self, settings: TrialSettings, world_size: int, device: Any, dropout: int) -> None:
        """Start the process. Its imports run while the ranks train."""
        self._folder = tempfile.TemporaryDirectory(prefix="ddpdoctor-reference-")
        self._limit_s = settings.limit_s * LIMIT_FACTOR * (2 + world_size)
        self._result = OneProcess(dropout=dropout)
        self._state: dict[str, Any] = {}
        self._gradients: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, *safe_flags(), "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(os.environ),
        )
        start = ReferenceStart(settings=settings, world_size=world_size, device=str(device))
        self._send(start)

    def keep_state(self, module: Any) -> None:
        """Copy parameters and buffers before a step, to the host because the rank needs its GPU itself."""
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}

    def keep_gradients(self, module: Any) -> None:
        """Copy the gradients that DDP left."""
        self._gradients = {
            name: one.grad.detach().to_dense().to("cpu", copy=True)
            for name, one in module.named_parameters()
            if one.grad is not None
        }

    def ask(self, step: int, records: Sequence[StepRecord]) -> None:
        """Have the step computed from the saved state, and keep how its gradients compare. Raises ``UserError``."""
        import torch

        if self._result.problem:
            return
        path = Path(self._folder.name) / f"{step}.pt"
        torch.save({"state": self._state, "gradients": self._gradients}, path)
        question = Question(
            step=step,
            path=str(path),
            batches=tuple(one.batch for one in records),
            losses=tuple(one.loss for one in records),
        )
        self._send(question)
        self._take(self._hear())
        path.unlink(missing_ok=True)

    def reference(self) -> OneProcess:
        """Return all that was compared."""
        return self._result

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()

    def _take(self, answer: ReferenceAnswer) -> None:
        steps: tuple[ReferenceStep, ...] = () if answer.step is None else (answer.step,)
        self._result = replace(
            self._result,
            steps=(*self._result.steps, *steps),
            float64=answer.float64,
            batchnorm=answer.batchnorm,
            hooked=answer.hooked,
            problem=answer.problem,
        )

    def _send(self, record: ReferenceStart | Question) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the next read reports that it ended
            self._process.stdin.write(json.dumps(encode(record)) + "\n")
            self._process.stdin.flush()

    def _hear(self) -> ReferenceAnswer:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._limit_s)[0]:
            raise UserError(
                f"the process that computes the reference did not answer within {self._limit_s:g} s", status=FAILED
            )
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise UserError(f"the process that computes the reference ended (status {status})", status=FAILED)
        try:
            return decode(ReferenceAnswer, json.loads(line))
        except (ValueError, WrongValue) as error:
            raise UserError(f"the process that computes the reference said {line[:80]!r}", status=FAILED) from error


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job of one process. It finds the same modules."""
    kept = {
        name: value for name, value in env.items() if not name.startswith(("TORCHELASTIC_", "SLURM_", "DDPDOCTOR_"))
    }
    folder = str(Path(ddpdoctor.__file__).parents[1])
    return {**kept, **ALONE, "PYTHONPATH": os.pathsep.join(filter(None, [env.get("PYTHONPATH"), folder]))}
