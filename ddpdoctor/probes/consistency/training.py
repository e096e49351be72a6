"""Builds the user's model, makes its batches, and trains it for a few steps under DDP."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpdoctor.model.consistency import Values, What
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import ModelSeen, TensorSeen
from ddpdoctor.probes.consistency import comparing
from ddpdoctor.probes.loading import leaves, load_callable, users_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.model.trial import TrialSettings

# What a model raises for a batch that it does not take. torch's own errors are RuntimeErrors.
_OF_BATCH = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
# Words of torch in such an error: "mat1 and mat2 shapes cannot be multiplied", "expected scalar type Long".
_MISFIT = re.compile(
    r"shape|size|dimension|dtype|scalar type|channels|data type|broadcast|must match|out of (?:range|bounds)|indices",
    re.IGNORECASE,
)
# From torch/csrc/distributed/c10d/reducer.cpp: a parameter got no gradient, or the backward was left out.
_UNUSED = "Expected to have finished reduction in the prior iteration"
# Our choice: SGD with momentum, so that it has state, for a model that came without an optimizer.
DEFAULT_LR, DEFAULT_MOMENTUM = 0.01, 0.9
RETURNS = "Let it return a torch.nn.Module, or (module, optimizer), or (module, optimizer, loss_fn)."
SAMPLES, TOKENS, PIXELS = 8, 16, 32  # our choice: the shape of a made-up batch
FAILED = 4  # exit status: the steps were needed but could not be run
BUILD, BATCH, STEP = range(3)  # purposes that get different random numbers
_NUMPY_SEEDS = 2**32


class Training:
    """The user's model on one rank, its batches and steps; after ``wrap`` in DDP, its forwards and reductions too."""

    def __init__(
        self, settings: TrialSettings, built: Built, rank: int, world_size: int, device: Any,
        mark: Callable[[str], None],
    ) -> None:  # fmt: skip
        """``mark`` is called with the name of the next phase, for the report of a hang. Raises ``UserError``."""
        self.built = built
        self.batches = choose_batches(settings, built.module, device)
        self.steps = TrainingStep(settings.step, built.loss_fn)
        self._settings, self._rank, self._world_size = settings, rank, world_size
        self._device, self._mark = device, mark
        self._forwards = self._unreduced = self._reductions = 0
        self._will_sync = False
        self._synced: tuple[comparing.TensorDigest, ...] | None = None
        self._batch = ""

    def wrap(self) -> None:
        """Wrap the model in DDP, which is collective. Raises ``UserError``."""
        module = self.built.module
        self._mark("DDP's constructor")
        self.ddp = wrap(module, self._device, unused=self._settings.unused)
        self._reduced = {id(param) for _, param in _trained(module)}

        def before_ddp(ddp: Any, _: Any) -> None:
            self._will_sync = ddp.will_sync_module_buffers()
            if torch.is_grad_enabled():
                self._forwards += 1
                self._unreduced += not ddp.require_backward_grad_sync

        def before_module(module: Any, _: Any) -> None:
            if self._will_sync and self._synced is None:
                self._synced = comparing.digest_rows(comparing.model_rows(module, What.BUFFER))
            self._will_sync = False

        # DDP's hook runs before DDP sends the buffers. The module's hook runs after that, before its forward.
        self.ddp.register_forward_pre_hook(before_ddp)
        module.register_forward_pre_hook(before_module)

    def compute(self, step: int) -> float | None:
        """Compute this step's gradients into the model; return the loss. Raises ``UserError``."""
        self._forwards = self._unreduced = 0
        self._synced = None
        self._mark(f"step {step}: the batch")
        batch = self.batches.get(self._rank, self._world_size, step)
        self._mark(f"step {step}: forward and backward")
        self._batch = comparing.batch_digest(batch)
        set_seed(self._settings.seed, STEP, step=step, rank=self._rank)
        try:
            loss = self.steps.run(self.ddp, batch, f"step {step}")
        except UserError as error:
            advice = "\n".join(filter(None, (error.help, hint_of(error, self._settings, self.batches))))
            raise UserError(error.message, help=advice, status=error.status) from error
        self._reductions += self._forwards > self._unreduced
        return loss

    def finish(self, step: int, loss: float | None) -> comparing.StepRecord:
        """Make the optimizer's step and return this rank's record of the step. Raises ``UserError``."""
        module, optimizer = self.built.module, self.built.optimizer
        gradients = comparing.digest_rows(comparing.model_rows(module, What.GRADIENT))
        self._mark(f"step {step}: the optimizer's step")
        with users_turn(f"the optimizer failed in step {step}", FAILED):
            optimizer.step()
        after = [*comparing.model_rows(module, What.PARAMETER), *comparing.state_rows(module, optimizer)]
        random_states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            random_states.append(torch.cuda.get_rng_state(self._device))
        dropout = nn.modules.dropout._DropoutNd  # noqa: SLF001 - their only base
        trained = _trained(module)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        values = Values(
            rank=self._rank, steps=step, reductions=self._reductions, forwards=self._forwards,
            unreduced_forwards=self._unreduced, settings=comparing.read_settings(optimizer),
            optimizer=type(optimizer).__name__,
            random=hashlib.sha256(b"".join(bytes(state.tolist()) for state in random_states)).hexdigest()[:16],
            dropout=any(isinstance(layer, dropout) and layer.training and layer.p > 0 for layer in module.modules()),
            unreduced=tuple(name for name, parameter in trained if id(parameter) not in self._reduced)[:8],
            stray=len(held - {id(parameter) for parameter in module.parameters()}),
            unheld=sum(id(parameter) not in held for _, parameter in trained),
        )  # fmt: skip
        return comparing.StepRecord(
            step=step, tensors=(*gradients, *comparing.digest_rows(after)), synced=self._synced, values=values,
            loss=loss, batch=self._batch,
        )  # fmt: skip


def hint_of(error: UserError, settings: TrialSettings, batches: Batches) -> str:
    """Return which option helps against an error of a step, or ""."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if _UNUSED in str(cause):
        if settings.unused:
            return ""
        return "If some losses are meant to leave out parameters, pass --find-unused-parameters."
    is_misfit = isinstance(cause, _OF_BATCH) or (isinstance(cause, RuntimeError) and _MISFIT.search(str(cause)))
    if settings.batch or not is_misfit or "out of memory" in str(cause):
        return ""
    return (
        f"The batch is {batches.words}. If the model takes something else, give yours: --batch "
        "package.module:make_batch; make_batch(rank, world_size, step) returns it."
    )


def wrap(module: Any, device: Any, *, unused: bool) -> Any:
    """Return a module wrapped in DDP over all ranks. Raises ``UserError``."""
    ids = [device.index] if device.type == "cuda" else None
    with users_turn("DDP rejects the model"):
        return DistributedDataParallel(module, device_ids=ids, find_unused_parameters=unused)


def _trained(module: Any) -> list[tuple[str, Any]]:
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad and name not in ignored]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What the user's function returned. ``loss_fn(output, target)`` is None if it returned none."""

    module: Any
    optimizer: Any
    loss_fn: Callable[..., Any] | None
    dropout: int = 0  # how many layers with dropout were made quiet


def build_seeded(settings: TrialSettings, device: Any) -> Built:
    """Build the model of a trial from its seed, without dropout if it is compared with one process."""
    set_seed(settings.seed, BUILD)
    built = build(load_callable(settings.model, "--model"), settings.model, device)
    return replace(built, dropout=quiet_dropout(built.module)) if settings.reference else built


def build(builder: Callable[..., Any], spec: str, device: Any) -> Built:
    """Return what the user's function builds, with the model on ``device``. Raises ``UserError``."""
    with users_turn(f"--model {spec} failed"):
        made = builder()
    parts = made if isinstance(made, tuple) else (made,)
    module, optimizer, loss_fn = (*parts, None, None, None)[:3]
    returned = f"--model {spec} returned"
    if isinstance(module, DistributedDataParallel):
        advice = "Return the bare module: ddpdoctor wraps it in DDP."
        raise UserError(f"{returned} a model that is already in DDP", help=advice)
    names = [type(part).__name__ for part in parts]
    kinds = names[0] if len(names) == 1 else f"({', '.join(names)})"
    if len(parts) not in {1, 2, 3} or not isinstance(module, torch.nn.Module):
        raise UserError(f"{returned} {kinds}, not a model", help=RETURNS)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{returned} {kinds}: the second is not a torch optimizer", help=RETURNS)
    if loss_fn is not None and not callable(loss_fn):
        raise UserError(f"{returned} {kinds}: the third is not a function", help=RETURNS)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"{returned} a model without trainable parameters", help="DDP refuses such a model.")
    with users_turn(f"--model {spec}: the model cannot be moved to {device}"):
        module.to(device)
    if not optimizer:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with users_turn(f"--model {spec}: SGD cannot train it"):
            optimizer = torch.optim.SGD(trained, lr=DEFAULT_LR, momentum=DEFAULT_MOMENTUM)
    return Built(module=module, optimizer=optimizer, loss_fn=loss_fn)


def see_model(module: Any, group: str) -> ModelSeen:
    """Return what DDP's constructor would receive: parameters, then buffers, in order."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    tensors = tuple(
        TensorSeen(
            name=name, dtype=str(tensor.dtype).removeprefix("torch."),
            shape=None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape),  # a lazy module's has no shape yet
            requires_grad=bool(tensor.requires_grad), is_buffer=is_buffer,
        )
        for is_buffer, named in ((False, module.named_parameters()), (True, module.named_buffers()))
        for name, tensor in named
        if name not in ignored
    )  # fmt: skip
    rows = [[tensor.name, tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_buffer] for tensor in tensors]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return ModelSeen(group=group, digest=digest, count=len(tensors), tensors=tensors, site=None)


def quiet_dropout(module: Any) -> int:
    """Set the probability of every dropout layer to 0, and return how many there were."""
    # Attention and recurrent layers store it as ``dropout``. Functional dropout is not reached.
    found = 0
    for layer in module.modules():
        name = "p" if isinstance(layer, nn.modules.dropout._DropoutNd) else "dropout"  # noqa: SLF001 - their only base
        share = getattr(layer, name, None)
        if isinstance(share, float) and share > 0:
            setattr(layer, name, 0.0)
            found += 1
    return found


class CannotJoin(Exception):  # noqa: N818 - says what it is
    """The ranks' batches cannot be joined into a global batch. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Where batches come from. ``make(rank, world_size, step)`` returns one, on any device."""

    make: Callable[[int, int, int], Any]
    words: str
    spec: str
    seed: int
    device: Any

    def get(self, rank: int, world_size: int, step: int) -> Any:
        """Return a batch on the device. Random numbers are seeded by rank and step. Raises ``UserError``."""
        set_seed(self.seed, BATCH, step=step, rank=rank)
        with users_turn(f"{self.spec} failed for rank {rank}, step {step}"):
            return map_tensors(self.make(rank, world_size, step), lambda tensor: tensor.to(self.device))


def choose_batches(settings: TrialSettings, module: Any, device: Any) -> Batches:
    """Return the user's batches, or random ones that fit the model's first layer. Raises ``UserError``."""
    chosen = partial(Batches, seed=settings.seed, device=device)
    if settings.batch:
        make = load_callable(settings.batch, "--batch")
        return chosen(make=make, words=settings.batch, spec=f"--batch {settings.batch}")
    for name, layer in module.named_modules():
        if guess := _guess(layer):
            said = f"{guess[1]}, made up for {name or 'the model'} ({type(layer).__name__})"
            return chosen(make=guess[0], words=said, spec="the made-up batch")
    raise UserError(
        "cannot guess the model's input: it has no Linear, Conv2d or Embedding",
        help="Give --batch package.module:make_batch; make_batch(rank, world_size, step) returns a batch.",
    )


def map_tensors(batch: Any, change: Callable[[Any], Any]) -> Any:
    return _rebuild(batch, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def join(batches: Sequence[Any]) -> Any:
    """Join batches along the first dimension of their tensors. Raises ``CannotJoin``."""
    rows = [list(leaves(batch)) for batch in batches]
    if len({tuple(place for place, _ in row) for row in rows}) > 1:
        raise CannotJoin("the batches of the ranks have different structures")
    joined = iter([_join_leaf(row[0][0], [leaf for _, leaf in row]) for row in zip(*rows, strict=True)])
    return _rebuild(batches[0], lambda _: next(joined))


def sample_counts(batches: Sequence[Any]) -> tuple[int, ...]:
    """Return how many samples each batch has: the length of its first tensor, or 0 if it has none."""
    return tuple(next((len(leaf) for _, leaf in leaves(batch) if getattr(leaf, "ndim", 0)), 0) for batch in batches)


def _rebuild(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with every leaf changed, in the order of ``leaves``."""
    if isinstance(batch, Mapping):
        return {key: _rebuild(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rebuild(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_rebuild(value, change) for value in batch)
    return change(batch)


def _join_leaf(place: str, parts: Sequence[Any]) -> Any:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        if any(part != parts[0] for part in parts):
            raise CannotJoin(f"{place} is not a tensor, and differs between ranks")
        return parts[0]
    if all(part.ndim == 0 for part in parts):
        if any(not torch.equal(part, parts[0]) for part in parts):
            raise CannotJoin(f"{place} is one number, and differs between ranks")
        return parts[0]
    if len({tuple(part.shape[1:]) for part in parts}) > 1:
        shown = " and ".join(str(list(part.shape)) for part in parts[:2])
        raise CannotJoin(f"{place} has shapes that do not match ({shown}, ...): pad them to one")
    return torch.cat(list(parts))


def _guess(layer: Any) -> tuple[Callable[[int, int, int], Any], str] | None:
    if isinstance(layer, nn.Linear):
        size: tuple[int, ...] = (SAMPLES, layer.in_features)
    elif isinstance(layer, nn.Conv2d):
        size = (SAMPLES, layer.in_channels, PIXELS, PIXELS)
    elif isinstance(layer, nn.Embedding):
        count, size = layer.num_embeddings, (SAMPLES, TOKENS)
        return lambda *_: torch.randint(0, count, size), f"int64{list(size)}"
    else:
        return None
    return lambda *_: torch.randn(size), f"float32{list(size)}"


class TrainingStep:
    """One training step without the optimizer, for any copy of the model."""

    def __init__(self, step: str, loss_fn: Callable[..., Any] | None) -> None:
        """``step`` names the user's training step, or is ""; ``loss_fn`` came with the model."""
        # How the loss is computed. If neither was given, this is known only after the first step.
        self.words = step or ("the loss_fn that came with the model" if loss_fn else "")
        self._spec = f"--step {step}" if step else "the model"
        self._step = load_callable(step, "--step") if step else None
        self._loss_fn = loss_fn

    def run(self, model: Any, batch: Any, when: str) -> float | None:
        """Compute fresh gradients; return the loss, None if it is not a single number. Raises ``UserError``."""
        for parameter in model.parameters():
            parameter.grad = None
        with users_turn(f"{self._spec} failed in {when}", FAILED):
            loss = self._loss(model, batch)
            # The user's step may have called backward itself.
            if all(parameter.grad is None for parameter in model.parameters()):
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise UserError(
                        f"{self._spec} returned {_describe_value(loss)} instead of a loss with a gradient",
                        help="Return the loss, a tensor of one element, from --step "
                        "package.module:train_step(model, batch).",
                        status=FAILED,
                    )
                loss.backward()
        return float(loss.detach()) if getattr(loss, "numel", lambda: 0)() == 1 else None

    def _loss(self, model: Any, batch: Any) -> Any:
        if self._step is not None:
            return self._step(model, batch)
        if self._loss_fn is not None:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise UserError(
                    f"there is a loss_fn, but a batch is {_describe_value(batch)}, not (input, target)",
                    help="Give --batch package.module:make_batch that returns (input, target), "
                    "or --step package.module:train_step(model, batch).",
                    status=FAILED,
                )
            return self._loss_fn(_call_model(model, batch[0]), batch[1])
        output = _call_model(model, batch)
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


def _call_model(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    length = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{length}"


def set_seed(seed: int, purpose: int, *, step: int = 0, rank: int = 0) -> None:
    """Seed the generators of Python, torch on all devices, and numpy if it is loaded."""
    # Prime factors, so that different steps, ranks and purposes do not collide.
    mixed = (seed * 1_000_003 + step * 10_007 + rank * 101 + purpose) % _NUMPY_SEEDS
    random.seed(mixed)
    torch.manual_seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed)
