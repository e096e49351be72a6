"""Computes gradients from a model and a batch, by the user's step, the user's loss, or what the model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.user_code import load_callable, users_turn

if TYPE_CHECKING:
    from collections.abc import Callable

FAILED = 4
"""Exit status: the steps were needed but could not be run."""


class TrainingStep:
    """One training step without the optimizer, for any copy of the model."""

    def __init__(self, step: str, loss_fn: Callable[..., Any] | None) -> None:
        """``step`` names the user's training step ("" for none), ``loss_fn`` is the loss that came with the model."""
        self.words = step or ("the loss_fn that came with the model" if loss_fn else "")
        """How the loss is computed. If neither was given, this is known only after the first step."""
        self._spec = f"--step {step}" if step else "the model"
        self._loss = self._choose(load_callable(step, "--step") if step else None, loss_fn)

    def run(self, model: Any, batch: Any, when: str) -> float | None:
        """Compute fresh gradients into the model. Return the loss, or None if it is not a single number.

        Raises ``UserError``.
        """
        for parameter in model.parameters():
            parameter.grad = None
        try:
            with users_turn(f"{self._spec} failed in {when}"):
                loss = self._loss(model, batch)
                # The user's step may have called backward itself.
                if all(parameter.grad is None for parameter in model.parameters()):
                    self._backward(loss)
        except UserError as error:
            raise UserError(error.message, help=error.help, status=FAILED) from error
        return float(loss.detach()) if getattr(loss, "numel", lambda: 0)() == 1 else None

    def _backward(self, loss: Any) -> None:
        import torch

        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UserError(
                f"{self._spec} returned no loss with a gradient, but {_describe(loss)}",
                help="Return the loss, a tensor of one element, from --step package.module:train_step(model, batch).",
            )
        loss.backward()

    def _choose(self, step: Callable[..., Any] | None, loss_fn: Callable[..., Any] | None) -> Callable[[Any, Any], Any]:
        if step is not None:
            return step
        if loss_fn is not None:
            return lambda model, batch: _with_loss(model, batch, loss_fn)
        return self._from_output

    def _from_output(self, model: Any, batch: Any) -> Any:
        import torch

        output = _call(model, batch)
        loss, words = output, "what the model returns"
        if getattr(output, "loss", None) is not None:
            loss, words = output.loss, "the output's loss"
        elif isinstance(output, Mapping) and "loss" in output:
            loss, words = output["loss"], "the output's loss"
        elif isinstance(output, (tuple, list)) and output:
            loss = output[0]
        if isinstance(loss, torch.Tensor) and loss.numel() != 1 and loss.is_floating_point():
            loss, words = loss.square().mean(), "the mean of the squared output, because no loss was given"
        self.words = words
        return loss


def _call(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _with_loss(model: Any, batch: Any, loss_fn: Callable[..., Any]) -> Any:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UserError(
            f"there is a loss_fn, but a batch is {_describe(batch)}, not (input, target)",
            help="Give --batch package.module:make_batch that returns (input, target), "
            "or --step package.module:train_step(model, batch).",
        )
    return loss_fn(_call(model, batch[0]), batch[1])


def _describe(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    length = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{length}"
