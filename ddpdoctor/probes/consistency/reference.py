"""The process that computes each step of the user's training alone: on the whole batch, and on each rank's part of it.

Rank 0 asks in lines of JSON. The user's code sees a process group of one rank. Gradients are compared in float64 on the
host. Memory: one gradient of the model for the whole batch and one for each rank's part, all of that twice.
"""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

import ddpdoctor
from ddpdoctor.collect.proc import safe_flags
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.trial import GradientErrors, OneProcess, ReferenceStep
from ddpdoctor.probes.consistency import training
from ddpdoctor.probes.consistency.comparing import batch_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ddpdoctor.model.trial import TrialSettings
    from ddpdoctor.probes.consistency.comparing import StepRecord

    Named = Mapping[str, Any]

MODULE = "ddpdoctor.probes.consistency.reference"
# What torchrun sets for a job of one process. LOCAL_RANK is kept because it chooses the GPU.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
# The user's step limit is multiplied by this for each pass: one process does the work of all ranks four times.
LIMIT_FACTOR = 2
STDERR = 2
# Our choice: the least rounding error of a gradient, in units in the last place of its norm. The order in which ranks
# are summed is worth about one. A parameter with few elements may be exact by chance in one computation.
FLOOR_ULPS = 8.0
# Our choice: we take float64's error to be 1e-6 of float32's rounding. Their digits would give 2**-29 = 2e-9.
EXACT_SHARE = 1e-6
# Our choice: if the order of samples alone changes a gradient by more than this share, it is not rounding.
UNSURE_SHARE = 1e-2
OTHER_NUMBERS = 7919  # Added to the seed to see whether random numbers make a difference. Any number does.
_IMPURE = (
    "the batch of rank {rank} at step {step} changed when make_batch was called again: it must depend only on (rank, "
    "world_size, step)"
)


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
    batches: tuple[str, ...]  # the digest of each rank's batch, in rank order
    losses: tuple[float | None, ...]


class ReferenceProcess:
    """A separate process, whose imports run while the ranks train. In it the user's code sees a job of one rank."""

    def __init__(self, settings: TrialSettings, world_size: int, device: Any, dropout: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ddpdoctor-reference-")
        self._limit_s = settings.limit_s * LIMIT_FACTOR * (2 + world_size)
        self.result = OneProcess(dropout=dropout)  # all that was compared so far
        self._state: dict[str, Any] = {}
        self._gradients: dict[str, Any] = {}
        # The environment of a job of one process, which finds the same modules
        others = ("TORCHELASTIC_", "SLURM_", "DDPDOCTOR_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        folder = str(Path(ddpdoctor.__file__).parents[1])
        paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
        # Answers come through a pipe of their own, because the user's code and torch may print.
        answers, there = os.pipe()
        self._answers = os.fdopen(answers)
        self._process = subprocess.Popen(
            [sys.executable, *safe_flags(), "-m", MODULE, str(there)], stdin=subprocess.PIPE, stdout=STDERR,
            pass_fds=[there], text=True, env={**kept, **ALONE, "PYTHONPATH": paths},
        )  # fmt: skip
        os.close(there)
        self._send(ReferenceStart(settings=settings, world_size=world_size, device=str(device)))

    @contextmanager
    def keeping(self, module: Any) -> Iterator[None]:
        """Copy parameters and buffers before a step, and then the gradients that DDP left."""
        # They are copied to the host because the rank needs its GPU itself.
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        yield
        self._gradients = take_gradients(module)

    def ask(self, step: int, records: Sequence[StepRecord]) -> None:
        """Have the step computed from what was kept, and add the comparison to ``result``. Raises ``UserError``."""
        if self.result.problem:
            return
        path = Path(self._folder.name) / f"{step}.pt"
        torch.save({"state": self._state, "gradients": self._gradients}, path)
        batches, losses = tuple(record.batch for record in records), tuple(record.loss for record in records)
        self._send(Question(step=step, path=str(path), batches=batches, losses=losses))
        answer = self._hear()
        self.result = replace(answer, dropout=self.result.dropout, steps=(*self.result.steps, *answer.steps))
        path.unlink(missing_ok=True)

    def close(self) -> None:
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._folder.cleanup()

    def _send(self, record: ReferenceStart | Question) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the next read reports that it ended
            self._process.stdin.write(json.dumps(encode(record)) + "\n")
            self._process.stdin.flush()

    def _hear(self) -> OneProcess:
        if not select.select([self._answers], [], [], self._limit_s)[0]:
            wrong = f"did not answer within {self._limit_s:g} s"
        elif not (line := self._answers.readline()):
            wrong = f"ended (status {self._process.wait()})"
        else:
            try:
                return decode(OneProcess, json.loads(line))
            except (ValueError, WrongValue):
                wrong = f"said {line[:80]!r}"
        raise UserError(f"the process that computes the reference {wrong}", status=training.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients from one state in one precision: of the whole batch, and of each rank's part of it."""

    whole: Named
    parts: tuple[Named, ...]


def compare_gradients(  # noqa: PLR0913 - each is one computation of the same gradient
    *,
    question: Question,
    ddp: Named,
    plain: Gradients,
    double: Gradients | None,
    other_numbers: Named,
    reordered: Named,
    still: Gradients | None,
    samples: tuple[int, ...],
    part_losses: tuple[float | None, ...],
) -> ReferenceStep:
    """Return a step's comparison. ``double`` is None without float64, and ``still`` (eval mode) without BatchNorm."""
    best = double or plain
    names = [name for name in best.whole if name in ddp and all(name in part for part in best.parts)]
    means = {name: _mean(best.parts, name) for name in names}
    held = {name: ddp[name].double() for name in names}
    # The weights that bring the parts' gradients closest to the whole batch's, by least squares
    shared = [{name: part[name] for name in names} for part in best.parts]
    gram = torch.tensor([[_dot(part, other) for other in shared] for part in shared], dtype=torch.float64)
    aims = torch.tensor([_dot(part, best.whole) for part in shared], dtype=torch.float64)
    weights = (math.nan,) * len(shared)
    if bool(torch.isfinite(gram).all() and torch.isfinite(aims).all()):
        # With the pseudo-inverse, equal parts share their weight.
        weights = tuple(float(weight) for weight in torch.linalg.pinv(gram, hermitian=True) @ aims)
    squared = _dot(means, means)
    scale = _dot(held, means) / squared if squared else 0.0
    rounding = _roundings(names, plain, double, reordered, ddp)
    rows = []
    for name in names:
        whole, mean, parts = best.whole[name], means[name], [part[name] for part in best.parts]
        exact = rounding[name]
        if double is not None:
            # How precisely float64 gradients of the whole batch and of its parts can be compared
            exact = min(exact, max(EXACT_SHARE * exact, _norm(whole - reordered[name])))
        rows.append(
            GradientErrors(
                name=name,
                elements=whole.numel(),
                norm=_norm(whole),
                ddp_norm=_norm(held[name]),
                rounding=rounding[name],
                exact=exact,
                whole=_norm(held[name] - whole),
                parts=_norm(held[name] - mean),
                local=_norm(held[name] - parts[0]),
                scaled=_norm(held[name] - scale * mean),
                maths=_norm(whole - mean),
                weighted=_norm(whole - sum(weight * part for weight, part in zip(weights, parts, strict=True))),
                without_batchnorm=None if still is None else _norm(still.whole[name] - _mean(still.parts, name)),
            )
        )
    noise = [_norm(best.whole[n] - other_numbers[n]) / rounding[n] for n in names if n in other_numbers]
    return ReferenceStep(
        step=question.step, scale=scale, weights=weights, samples=samples, losses=question.losses,
        part_losses=part_losses, random_error=max(noise, default=0.0), tensors=tuple(rows),
        missing=tuple(sorted({*best.whole} ^ {*ddp}))[:8],
    )  # fmt: skip


def _roundings(
    names: Sequence[str], plain: Gradients, double: Gradients | None, reordered: Named, ddp: Named
) -> dict[str, float]:
    own = {}
    for name in names:
        if double is None:
            # Without float64, compare with the same sum in another order.
            error = _norm(plain.whole[name] - reordered[name])
            own[name] = min(error, UNSURE_SHARE * _norm(plain.whole[name]))
        else:
            pairs = [(plain.whole, double.whole), *zip(plain.parts, double.parts, strict=True)]
            own[name] = max(_norm(vector[name] - other[name]) for vector, other in pairs)
    norms = {name: _norm((double or plain).whole[name]) for name in names}
    # A gradient that is all rounding, such as a bias before BatchNorm, says nothing about the others.
    shares = [own[name] / norms[name] for name in names if norms[name] > own[name]]
    typical = statistics.median(shares) if shares else 0.0
    floors = {name: FLOOR_ULPS * torch.finfo(ddp[name].dtype).eps for name in names}
    return {name: max(own[name], norms[name] * max(typical, floors[name]), math.ulp(0.0)) for name in names}


def _mean(parts: Sequence[Named], name: str) -> Any:
    return sum(part[name] for part in parts) / len(parts)


def _dot(vector: Named, other: Named) -> float:
    return float(sum((vector[name] * other[name]).sum() for name in vector))


def _norm(tensor: Any) -> float:
    return float(tensor.norm())


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    start = decode(ReferenceStart, json.loads(sys.stdin.readline()))
    try:
        alone: Alone | None = Alone(start)
        answer = OneProcess()
    except UserError as error:
        alone, answer = None, _trouble(error)
    for line in sys.stdin:
        if alone is not None:
            answer = alone.answer(decode(Question, json.loads(line)))
        answers.write(json.dumps(encode(answer)) + "\n")


def _trouble(error: UserError) -> OneProcess:
    return OneProcess(problem=f"in one process, {error.message}" + (f" ({error.help})" if error.help else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    module: Any
    ddp: Any
    steps: training.TrainingStep
    change: Callable[[Any], Any]  # converts a batch's tensor to that precision


class Alone:
    """The model in one process, in its own precision and if possible in float64. Making it raises ``UserError``."""

    def __init__(self, start: ReferenceStart) -> None:
        self._settings, self._world_size = start.settings, start.world_size
        self._device = torch.device(start.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        store = distributed.HashStore()
        distributed.init_process_group(self._settings.backend, store=store, rank=0, world_size=1)
        built = training.build_seeded(self._settings, self._device)
        self._batches: training.Batches = training.choose_batches(self._settings, built.module, self._device)
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        parameters = built.module.named_parameters()
        self._hooked = tuple(name for name, tensor in parameters if any(getattr(tensor, kind, None) for kind in hooks))
        self._batchnorm = tuple(name for name, module in built.module.named_modules() if is_batchnorm(module))
        self._plain = self._copy(built, lambda tensor: tensor)
        self._double: _Copy | None = None
        double = training.build_seeded(self._settings, self._device)
        if double.module is not built.module:
            with suppress(Exception):  # the user's classes may raise anything; rounding is then estimated otherwise
                double.module.double()
                if isinstance(double.loss_fn, torch.nn.Module):
                    double.loss_fn.double()
                self._double = self._copy(double, lambda part: part.double() if part.is_floating_point() else part)

    def answer(self, question: Question) -> OneProcess:
        kept = torch.load(question.path, map_location="cpu", weights_only=True)
        try:
            batches = [self._batches.get(rank, self._world_size, question.step) for rank in range(self._world_size)]
            changed = [rank for rank, batch in enumerate(batches) if batch_digest(batch) != question.batches[rank]]
            if changed:
                return self._reply(problem=_IMPURE.format(rank=changed[0], step=question.step))
            return self._reply(self._compare(question, kept, batches))
        except training.CannotJoin as error:
            return self._reply(problem=f"cannot join the batches of all ranks: {error}")
        except UserError as error:
            return _trouble(error)

    def _reply(self, *steps: ReferenceStep, problem: str = "") -> OneProcess:
        return OneProcess(
            steps=steps, float64=self._double is not None, batchnorm=self._batchnorm, hooked=self._hooked,
            problem=problem,
        )  # fmt: skip

    def _compare(self, question: Question, kept: Any, batches: Sequence[Any]) -> ReferenceStep:
        whole, double = training.join(batches), None
        plain, losses = self._compute_all(self._plain, kept, whole, batches, question.step)
        try:
            if self._double is not None:
                double, _ = self._compute_all(self._double, kept, whole, batches, question.step)
        except UserError:  # a layer or the user's code does not support float64
            self._double = None
        copy_ = self._double or self._plain
        other, _ = self._compute(copy_, kept, whole, question.step, 0, seed=OTHER_NUMBERS)
        samples = training.sample_counts(batches)
        # The gradient of the samples in reverse order is the same sum, added in another order.
        backwards = training.map_tensors(
            whole, lambda tensor: tensor.flip(0) if tensor.ndim and tensor.shape[0] == sum(samples) else tensor
        )
        reordered, _ = self._compute(copy_, kept, backwards, question.step, 0)
        # BatchNorm's running statistics are the same for any batch, in eval mode.
        still, layers = None, [layer for layer in copy_.module.modules() if is_batchnorm(layer)]
        if self._batchnorm:
            for layer in layers:
                layer.eval()
            try:
                still, _ = self._compute_all(copy_, kept, whole, batches, question.step)
            finally:
                for layer in layers:
                    layer.train()
        return compare_gradients(
            question=question, ddp=kept["gradients"], plain=plain, double=double, other_numbers=other,
            reordered=reordered, still=still, samples=samples, part_losses=losses,
        )  # fmt: skip

    def _compute_all(
        self, copy: _Copy, kept: Any, whole: Any, batches: Sequence[Any], step: int
    ) -> tuple[Gradients, tuple[float | None, ...]]:
        parts = [self._compute(copy, kept, batch, step, rank) for rank, batch in enumerate(batches)]
        gradients, _ = self._compute(copy, kept, whole, step, 0)
        return Gradients(whole=gradients, parts=tuple(part for part, _ in parts)), tuple(loss for _, loss in parts)

    def _compute(
        self, copy: _Copy, kept: Any, batch: Any, step: int, rank: int, *, seed: int = 0
    ) -> tuple[dict[str, Any], float | None]:
        with torch.no_grad():
            for name, tensor in [*copy.module.named_parameters(), *copy.module.named_buffers()]:
                tensor.copy_(kept["state"][name])
        training.set_seed(self._settings.seed + seed, training.STEP, step=step, rank=rank)
        loss = copy.steps.run(copy.ddp, training.map_tensors(batch, copy.change), f"step {step}")
        return take_gradients(copy.module, torch.float64), loss

    def _copy(self, built: training.Built, change: Callable[[Any], Any]) -> _Copy:
        ddp = training.wrap(built.module, self._device, unused=self._settings.unused)
        steps = training.TrainingStep(self._settings.step, built.loss_fn)
        return _Copy(module=built.module, ddp=ddp, steps=steps, change=change)


def take_gradients(module: Any, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return a dense copy of a model's gradients, on the host because there is room for many of them."""
    gradients = ((name, parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None)
    return {name: gradient.detach().to_dense().to(device="cpu", dtype=dtype, copy=True) for name, gradient in gradients}


def is_batchnorm(module: Any) -> bool:
    """Return whether a layer computes statistics on its own rank's batch: BatchNorm in training, not SyncBatchNorm."""
    family = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - their only base
    return isinstance(module, family) and not isinstance(module, nn.SyncBatchNorm) and bool(module.training)


if __name__ == "__main__":
    main()
