"""Trains the user's model for a few steps under DDP, and records each step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import Values
from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.consistency.losses import FAILED
from ddpdoctor.probes.consistency.seeds import STEP, set_seed
from ddpdoctor.probes.consistency.step_records import (
    StepRecord,
    TensorDigest,
    batch_digest,
    buffer_rows,
    digest_rows,
    gradient_rows,
    parameter_rows,
    random_digest,
    read_settings,
    state_rows,
)
from ddpdoctor.probes.user_code import users_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.trial import TrialSettings
    from ddpdoctor.probes.consistency.batches import Batches
    from ddpdoctor.probes.consistency.building import Built
    from ddpdoctor.probes.consistency.losses import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """What one rank trains, and on what device and data."""

    settings: TrialSettings
    rank: int
    world_size: int
    device: Any
    built: Built
    batches: Batches
    steps: TrainingStep
    mark: Callable[[str], None]
    """Called with the name of the next phase, so that the report can name the phase of a rank that hangs."""


class Training:
    """The model in DDP, and counts of its forwards and reductions."""

    def __init__(self, setting: TrainingSetup) -> None:
        """Wrap the model in DDP, which is collective. Raises ``UserError``."""
        self._setting = setting
        module = setting.built.module
        setting.mark("DDP's constructor")
        self.ddp = wrap(module, setting.device, unused=setting.settings.unused)
        self._reduced = {
            id(one) for name, one in module.named_parameters() if one.requires_grad and _kept(module, name)
        }
        self._forwards = self._unreduced = self._reductions = 0
        self._will_sync = False
        self._synced: tuple[TensorDigest, ...] | None = None
        self._batch = ""
        # DDP's hook runs before DDP sends the buffers. The module's hook runs after that, before its forward.
        self.ddp.register_forward_pre_hook(self._before_ddp)
        module.register_forward_pre_hook(self._before_module)

    def compute(self, step: int) -> float | None:
        """Compute this step's gradients into the model and return the loss. Raises ``UserError``."""
        one = self._setting
        self._forwards = self._unreduced = 0
        self._synced = None
        one.mark(f"step {step}: the batch")
        batch = one.batches.get(one.rank, one.world_size, step)
        one.mark(f"step {step}: forward and backward")
        self._batch = batch_digest(batch)
        set_seed(one.settings.seed, STEP, step=step, rank=one.rank)
        try:
            loss = one.steps.run(self.ddp, batch, f"step {step}")
        except UserError as error:
            hint = hint_of(error, one.settings, one.batches)
            raise UserError(
                error.message, help="\n".join(filter(None, (error.help, hint))), status=error.status
            ) from error
        self._reductions += self._forwards > self._unreduced
        return loss

    def finish(self, step: int, loss: float | None) -> StepRecord:
        """Make the optimizer's step and return this rank's record of the step. Raises ``UserError``."""
        module, optimizer = self._setting.built.module, self._setting.built.optimizer
        gradients = digest_rows(gradient_rows(module))
        self._setting.mark(f"step {step}: the optimizer's step")
        try:
            with users_turn(f"the optimizer failed in step {step}"):
                optimizer.step()
        except UserError as error:
            raise UserError(error.message, help=error.help, status=FAILED) from error
        after = digest_rows([*parameter_rows(module), *state_rows(module, optimizer)])
        return StepRecord(
            step=step,
            tensors=(*gradients, *after),
            synced=self._synced,
            values=self._values(step),
            loss=loss,
            batch=self._batch,
        )

    def _before_ddp(self, ddp: Any, _: Any) -> None:
        import torch

        self._will_sync = ddp.will_sync_module_buffers()
        if torch.is_grad_enabled():
            self._forwards += 1
            self._unreduced += not ddp.require_backward_grad_sync

    def _before_module(self, module: Any, _: Any) -> None:
        if self._will_sync and self._synced is None:
            self._synced = digest_rows(buffer_rows(module))
        self._will_sync = False

    def _values(self, step: int) -> Values:
        module, optimizer = self._setting.built.module, self._setting.built.optimizer
        trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad and _kept(module, name)]
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return Values(
            rank=self._setting.rank,
            steps=step,
            reductions=self._reductions,
            forwards=self._forwards,
            unreduced_forwards=self._unreduced,
            settings=read_settings(optimizer),
            optimizer=type(optimizer).__name__,
            random=random_digest(self._setting.device),
            dropout=has_dropout(module),
            unreduced=tuple(name for name, one in trained if id(one) not in self._reduced)[:8],
            stray=len(held - {id(one) for one in module.parameters()}),
            unheld=sum(id(one) not in held for _, one in trained),
        )


_OF_BATCH = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What a model raises for a batch that it does not take. torch's own errors are RuntimeErrors."""
_MISFIT = re.compile(
    r"shape|size|dimension|dtype|scalar type|channels|data type|broadcast|must match|out of (?:range|bounds)|indices",
    re.IGNORECASE,
)
"""Words of torch in such an error: "mat1 and mat2 shapes cannot be multiplied", "expected scalar type Long"."""
_UNUSED = "Expected to have finished reduction in the prior iteration"
"""From torch/csrc/distributed/c10d/reducer.cpp: a parameter got no gradient, or the backward was left out."""


def hint_of(error: UserError, settings: TrialSettings, batches: Batches) -> str:
    """Return which option helps against an error of a step, or nothing if none does."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if _UNUSED in str(cause):
        if settings.unused:
            return ""
        return "If parameters are meant to take no part in some losses, pass --find-unused-parameters."
    is_misfit = isinstance(cause, _OF_BATCH) or (isinstance(cause, RuntimeError) and _MISFIT.search(str(cause)))
    if settings.batch or not is_misfit or "out of memory" in str(cause):
        return ""
    return (
        f"The batch is {batches.words}. If the model takes something else, give yours: --batch "
        "package.module:make_batch; make_batch(rank, world_size, step) returns it."
    )


def wrap(module: Any, device: Any, *, unused: bool) -> Any:
    """Return a module wrapped in DDP over all ranks. Raises ``UserError``."""
    from torch.nn.parallel import DistributedDataParallel

    ids = [device.index] if device.type == "cuda" else None
    with users_turn("DDP does not take the model"):
        return DistributedDataParallel(module, device_ids=ids, find_unused_parameters=unused)


def has_dropout(module: Any) -> bool:
    """Return whether the model has an active dropout layer."""
    from torch import nn

    return any(
        isinstance(one, nn.modules.dropout._DropoutNd) and one.training and one.p > 0  # noqa: SLF001 - their only base
        for one in module.modules()
    )


def _kept(module: Any, name: str) -> bool:
    return name not in getattr(module, "_ddp_params_and_buffers_to_ignore", ())
