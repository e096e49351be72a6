"""Computes a step of the user's training in one process: on the whole batch, and on each rank's part of it.

``reference_process`` starts it, asks on stdin and reads answers from stdout. All other output goes to stderr. The
user's code sees a process group of one rank. The model is in DDP here too, as on the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.consistency.batches import Batches, CannotJoin, choose_batches, join, map_tensors, sample_counts
from ddpdoctor.probes.consistency.building import build, quiet_dropout
from ddpdoctor.probes.consistency.gradient_errors import Gradients, compare_gradients
from ddpdoctor.probes.consistency.losses import TrainingStep
from ddpdoctor.probes.consistency.reference_process import Question, ReferenceAnswer, ReferenceStart
from ddpdoctor.probes.consistency.seeds import BUILD, STEP, set_seed
from ddpdoctor.probes.consistency.step_records import batch_digest
from ddpdoctor.probes.consistency.training import wrap
from ddpdoctor.probes.user_code import load_callable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.model.trial import ReferenceStep
    from ddpdoctor.probes.consistency.building import Built

OTHER_NUMBERS = 7919
"""Added to the seed to see whether random numbers make a difference. Any number does."""


def main() -> None:
    """Answer questions until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = decode(ReferenceStart, json.loads(sys.stdin.readline()))
    try:
        alone: Alone | None = Alone(start)
        answer = ReferenceAnswer()
    except UserError as error:
        alone, answer = None, _trouble(error)
    for line in sys.stdin:
        if alone is not None:
            answer = alone.answer(decode(Question, json.loads(line)))
        answers.write(json.dumps(encode(answer)) + "\n")


def _trouble(error: UserError) -> ReferenceAnswer:
    return ReferenceAnswer(problem=f"in one process, {error.message}" + (f" ({error.help})" if error.help else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """The model in one precision."""

    module: Any
    ddp: Any
    steps: TrainingStep
    change: Callable[[Any], Any]
    """Converts a batch's tensor to that precision."""


class Alone:
    """The model in one process, in its own precision and, if possible, in float64."""

    def __init__(self, start: ReferenceStart) -> None:
        """Build the model. Raises ``UserError``."""
        import torch

        self._settings, self._world_size = start.settings, start.world_size
        self._device = torch.device(start.device)
        self._open_group()
        built = self._build()
        self._batches: Batches = choose_batches(self._settings, built.module, self._device)
        self._hooked = tuple(name for name, one in built.module.named_parameters() if _has_hooks(one))
        self._batchnorm = tuple(name for name, one in built.module.named_modules() if is_batchnorm(one))
        self._plain = self._copy(built, lambda tensor: tensor)
        self._double = self._in_double(built)

    def answer(self, question: Question) -> ReferenceAnswer:
        """Return how DDP's gradients of a step compare with those of one process."""
        import torch

        kept = torch.load(question.path, map_location="cpu", weights_only=True)
        try:
            batches = [self._batches.get(rank, self._world_size, question.step) for rank in range(self._world_size)]
            changed = [rank for rank, one in enumerate(batches) if batch_digest(one) != question.batches[rank]]
            if changed:
                return self._reply(problem=_IMPURE.format(rank=changed[0], step=question.step))
            return self._reply(step=self._compare(question, kept, batches))
        except CannotJoin as error:
            return self._reply(problem=f"cannot join the batches of all ranks: {error}")
        except UserError as error:
            return _trouble(error)

    def _reply(self, *, step: ReferenceStep | None = None, problem: str = "") -> ReferenceAnswer:
        return ReferenceAnswer(
            step=step,
            float64=self._double is not None,
            batchnorm=self._batchnorm,
            hooked=self._hooked,
            problem=problem,
        )

    def _compare(self, question: Question, kept: Any, batches: Sequence[Any]) -> ReferenceStep:
        whole, double = join(batches), None
        plain, losses = self._compute_all(self._plain, kept, whole, batches, question.step)
        if self._double is not None:
            try:
                double, _ = self._compute_all(self._double, kept, whole, batches, question.step)
            except UserError:  # a layer or the user's code does not support float64
                self._double = None
        copy_ = self._double or self._plain
        other, _ = self._compute(copy_, kept, whole, question.step, 0, seed=OTHER_NUMBERS)
        return compare_gradients(
            question=question,
            ddp=kept["gradients"],
            plain=plain,
            double=double,
            other_numbers=other,
            reordered=self._compute(copy_, kept, _reverse(whole, sum(sample_counts(batches))), question.step, 0)[0],
            still=self._without_batchnorm(copy_, kept, whole, batches, question.step) if self._batchnorm else None,
            samples=sample_counts(batches),
            part_losses=losses,
        )

    def _compute_all(
        self, one: _Copy, kept: Any, whole: Any, batches: Sequence[Any], step: int
    ) -> tuple[Gradients, tuple[float | None, ...]]:
        """Return the gradients of the whole batch and of each part, and the losses of the parts."""
        parts = [self._compute(one, kept, batch, step, rank) for rank, batch in enumerate(batches)]
        gradients, _ = self._compute(one, kept, whole, step, 0)
        return Gradients(whole=gradients, parts=tuple(part for part, _ in parts)), tuple(loss for _, loss in parts)

    def _without_batchnorm(
        self, one: _Copy, kept: Any, whole: Any, batches: Sequence[Any], step: int
    ) -> Gradients:  # fmt: skip
        """Return the gradients with BatchNorm in eval mode: its running statistics are the same for any batch."""
        layers = [layer for layer in one.module.modules() if is_batchnorm(layer)]
        for layer in layers:
            layer.eval()
        try:
            return self._compute_all(one, kept, whole, batches, step)[0]
        finally:
            for layer in layers:
                layer.train()

    def _compute(
        self, one: _Copy, kept: Any, batch: Any, step: int, rank: int, *, seed: int = 0
    ) -> tuple[dict[str, Any], float | None]:
        """Return a batch's gradients and its loss, computed from the saved state."""
        import torch

        with torch.no_grad():
            for name, tensor in [*one.module.named_parameters(), *one.module.named_buffers()]:
                tensor.copy_(kept["state"][name])
        set_seed(self._settings.seed + seed, STEP, step=step, rank=rank)
        loss = one.steps.run(one.ddp, map_tensors(batch, one.change), f"step {step}")
        return take_gradients(one.module), loss

    def _build(self) -> Built:
        set_seed(self._settings.seed, BUILD)
        built = build(load_callable(self._settings.model, "--model"), self._settings.model, self._device)
        quiet_dropout(built.module)
        return built

    def _in_double(self, plain: Built) -> _Copy | None:
        """Return a second copy of the model in float64, or None if it does not support that."""
        import torch

        built = self._build()
        if built.module is plain.module:
            return None
        try:
            built.module.double()
            if isinstance(built.loss_fn, torch.nn.Module):
                built.loss_fn.double()
            return self._copy(built, _to_double)
        except Exception:  # noqa: BLE001 - the user's classes may raise anything; rounding is then estimated otherwise
            return None

    def _copy(self, built: Built, change: Callable[[Any], Any]) -> _Copy:
        return _Copy(
            module=built.module,
            ddp=wrap(built.module, self._device, unused=self._settings.unused),
            steps=TrainingStep(self._settings.step, built.loss_fn),
            change=change,
        )

    def _open_group(self) -> None:
        import torch
        from torch import distributed

        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        store = distributed.HashStore()
        distributed.init_process_group(self._settings.backend, store=store, rank=0, world_size=1)


_IMPURE = (
    "the batch of rank {rank} at step {step} changed when make_batch was called again: it must depend only on (rank, "
    "world_size, step)"
)


def take_gradients(module: Any) -> dict[str, Any]:
    """Return a dense float64 copy of a model's gradients, on the host because there is room for many of them."""
    import torch

    gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    return {
        name: gradient.detach().to_dense().to(device="cpu", dtype=torch.float64, copy=True)
        for name, gradient in gradients.items()
    }


def is_batchnorm(module: Any) -> bool:
    """Return whether a layer computes statistics on its own rank's batch: BatchNorm in training, not SyncBatchNorm."""
    from torch import nn

    family = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - their only base
    return isinstance(module, family) and not isinstance(module, nn.SyncBatchNorm) and bool(module.training)


def _to_double(tensor: Any) -> Any:
    return tensor.double() if tensor.is_floating_point() else tensor


def _has_hooks(parameter: Any) -> bool:
    return bool(
        getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )  # fmt: skip


def _reverse(batch: Any, samples: int) -> Any:
    """Return a batch with its samples in reverse order. The gradient is the same sum, added in another order."""
    return map_tensors(batch, lambda tensor: tensor.flip(0) if tensor.ndim and tensor.shape[0] == samples else tensor)


if __name__ == "__main__":
    main()
