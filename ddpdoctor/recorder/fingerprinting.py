"""Fingerprints a replica after an optimizer's step, at a forward, after a buffer broadcast, and at the end.

``schedule`` says which of them are due. Nothing here communicates with other ranks, and nothing is left on a GPU or in
autograd. With the fingerprints of the tensors go values as JSON, the fields of ``model.consistency.Values``. A field
that has its default is left out. ``site`` is a frame from ``frames.describe``; ``settings`` is a list of pairs.

Which optimizers were made is recorded, and which parameters a module got too late for an optimizer to hold them.
Nothing is kept about parameters that existed before the first optimizer, as most do.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from typing import Any, Dict, List, Optional, Tuple

from . import frames, hooks, replicas, schedule
from .capture import is_capturing
from .replicas import Replica, all_replicas
from .schedule import FingerprintFiles
from .state import guarded, here
from .storage import fingerprint_file
from .storage.secrets import hide_in_text

# How long the end waits for a busy GPU, which may be in a collective that never completes. Our choice.
GPU_WAIT_S = 1.0


def may_fingerprint() -> bool:
    """Return whether tensors can be read now: not while torch compiles or a CUDA graph is captured."""
    torch: Any = sys.modules["torch"]
    return not torch.compiler.is_compiling() and not is_capturing()


class StepFingerprints:
    """The fingerprints of one model at one optimizer's steps. It outlives the optimizer and keeps no tensor alive."""

    def __init__(self, replica: Any, optimizer: Any) -> None:
        self.replica = replica  # a ``Replica``, or an ``Unwrapped`` if no DDP holds the parameters
        self.steps = 0
        self._files: Optional[FingerprintFiles] = None
        # By name: the fingerprint of a parameter that no optimizer changes, and at how many checks in a row it was the
        # same.
        self._still: Dict[str, Tuple[bytes, int]] = {}
        self._forwards, self._unreduced = replica.before_step
        self._gradients: Rows = []
        self._taken: Any = None  # their ``fingerprint.Fingerprints``, read when the step has ended
        self._sample: Any = lambda: None  # a weak reference to one parameter that the optimizer changes
        self._left = (0, 0)  # the sample's version and address at the end of the last step
        self._between = 0
        self.follow(optimizer)

    def follow(self, optimizer: Any) -> None:
        """Update the sample after the optimizer's or the model's parameters may have changed."""
        trained = [tensor for _, tensor in self._named(optimizer) if tensor.requires_grad]
        if trained and trained[0] is not self._sample():
            self._sample = weakref.ref(trained[0])
            self._leave()
            self._between = 0

    def _named(self, optimizer: Any) -> List[Any]:
        held = {id(tensor) for tensor in held_by(optimizer)}
        return [named for named in named_parameters(self.replica) if id(named[1]) in held]

    def begins(self) -> None:
        """Note that a step begins, and count the script's usual changes to parameters since the last one."""
        self._taken = None
        sample = self._sample()
        if sample is not None:
            self._between = sample._version - self._left[0]

    def ended(self, steps: int) -> None:
        """Note that a step has ended."""
        replica = self.replica
        self.steps = steps
        self._forwards, self._unreduced = replica.before_step = (replica.forwards, replica.unreduced_forwards)
        replica.last_stepped = self
        if isinstance(replica, replicas.Unwrapped):
            replica.stepped(steps)
        self._leave()

    def _leave(self) -> None:
        sample = self._sample()
        if sample is not None:
            self._left = (sample._version, sample.data_ptr())

    def is_edited(self) -> bool:
        """Return whether parameters changed more since the last step than they did between the two steps before.

        That happens if one rank loads the best weights, or folds them, for an evaluation after training.
        """
        sample, module = self._sample(), self.replica.module()
        if sample is None or module is None or not any(tensor is sample for tensor in module.parameters()):
            return True
        version, place = self._left
        return bool(sample.data_ptr() != place or sample._version - version > self._between)

    def take_first(self) -> None:
        """Write the parameters as they are before the first step."""
        values = dict(model_values(self.replica, [], []), steps=0, forwards=0, unreduced_forwards=0)
        rows = parameter_rows(named_parameters(self.replica))
        write(self._own_files(), 0, values, rows)

    def take_before(self, optimizer: Any) -> None:
        """Fingerprint the gradients as the optimizer gets them."""
        self._gradients = gradient_rows(self._named(optimizer))
        self._taken = fingerprints_of(self._gradients)

    def take_after(self, number: int, optimizer: Any, optimizers: List[Any], frame: Any) -> None:
        """Write the record of step ``number``.

        If a closure computed the gradients within the step, they are fingerprinted here.
        """
        if self._taken is None:
            self.take_before(optimizer)
        rows, gradients = self._gradients, self._taken
        self._gradients, self._taken = [], None
        replica = self.replica
        named = named_parameters(replica)
        after = parameter_rows(named) + state_rows(self._named(optimizer), optimizer)
        if not replica.syncs_buffers:
            after += buffer_rows(replica)
        values = dict(
            model_values(replica, named, optimizers),
            steps=number,
            forwards=replica.forwards - self._forwards,
            unreduced_forwards=replica.unreduced_forwards - self._unreduced,
            site=frames.describe_user(frame),
            every=schedule.distance(),
        )
        values.update(optimizer_values(optimizer))
        before, taken = gradients.value(), fingerprints_of(after).value()
        values.update(self._find_untrained(named, taken, optimizer, optimizers))
        write(self._own_files(), number, values, rows + after, before + taken)

    def _find_untrained(
        self, named: List[Tuple[str, Any]], taken: bytes, optimizer: Any, others: List[Any]
    ) -> Dict[str, Any]:
        """Return the parameters that get gradients but no optimizer changes, first those that came after this one.

        ``taken`` starts with the parameters' fingerprints, in the order of ``named``.
        """
        everybody = [*optimizers(), *others]
        held = {id(tensor) for one in everybody for tensor in held_by(one)}
        still: Dict[str, Tuple[bytes, int]] = {}
        late: List[str] = []
        early: List[str] = []
        for i, (name, tensor) in enumerate(named):
            if id(tensor) in held or not tensor.requires_grad or tensor.grad is None:
                continue
            value = taken[i * fingerprint_file.FINGERPRINT_SIZE : (i + 1) * fingerprint_file.FINGERPRINT_SIZE]
            before, times = self._still.get(name, (b"", 0))
            still[name] = (value, times + 1 if value == before else 0)
            if still[name][1] >= MIN_STILL:
                (late if is_later_than(tensor, optimizer) else early).append(name[:MAX_NAME])
        self._still = still
        return {"untrained": (late + early)[:MAX_NAMES], "untrained_count": len(late + early), "late": len(late)}

    def _own_files(self) -> FingerprintFiles:
        """Return the files to write to. An optimizer gets its number when they are first needed."""
        if self._files is None:
            self.replica.optimizers += 1
            self._files = FingerprintFiles(_about(self.replica, fingerprint_file.STEP, self.replica.optimizers))
        return self._files


class ModelFingerprints:
    """The fingerprints of one model at its forwards, its buffer broadcasts, and its end."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.forward_taken = 0  # the backwards with reductions when the model was last fingerprinted at a forward
        self.sync_taken = -1
        self._files: Dict[str, FingerprintFiles] = {}  # by clock
        self._forwards = self._unreduced = 0

    def take_at_forward(self, optimizers: List[Any], frame: Any) -> None:
        """Write parameters, and buffers that DDP does not broadcast, at a forward."""
        replica = self.replica
        values = dict(self._values(optimizers), site=frames.describe_user(frame))
        self._write(fingerprint_file.FORWARD, values, _whole(replica))
        self._forwards, self._unreduced = replica.forwards, replica.unreduced_forwards

    def take_after_sync(self) -> None:
        """Write the buffers that DDP has just broadcast."""
        values = {"steps": 0, "reductions": self.replica.reductions, "forwards": 0, "unreduced_forwards": 0}
        self._write(fingerprint_file.SYNC, values, buffer_rows(self.replica))

    def take_at_end(self, steps: int) -> None:
        """Write the model as training left it, after ``steps`` steps. The optimizers may be gone already."""
        values = dict(self._values([]), steps=steps, stray=0, unheld=0)
        self._write(fingerprint_file.END, values, _whole(self.replica))

    def _values(self, optimizers: List[Any]) -> Dict[str, Any]:
        replica = self.replica
        return dict(
            model_values(replica, named_parameters(replica), optimizers),
            steps=0,
            forwards=replica.forwards - self._forwards,
            unreduced_forwards=replica.unreduced_forwards - self._unreduced,
        )

    def _write(self, clock: str, values: Dict[str, Any], rows: Rows) -> None:
        if clock not in self._files:
            most = 1 if clock == fingerprint_file.END else fingerprint_file.MAX_SLOTS
            self._files[clock] = FingerprintFiles(_about(self.replica, clock), most)
        write(self._files[clock], self.replica.reductions, values, rows)


def gpu_is_idle() -> bool:
    """Return whether the GPU finishes its work within ``GPU_WAIT_S``, so that it can be read without a hang."""
    torch: Any = sys.modules["torch"]
    if is_capturing():
        return False
    if not torch.cuda.is_initialized():
        return True
    until = time.monotonic() + GPU_WAIT_S
    while not torch.cuda.current_stream().query():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _whole(replica: Replica) -> Rows:
    rows = parameter_rows(named_parameters(replica))
    return rows if replica.syncs_buffers else rows + buffer_rows(replica)


def _about(replica: Replica, clock: str, optimizer: int = 0) -> Dict[str, Any]:
    """Return a stream's table without its rows."""
    place = {"ranks": list(replica.ranks), "model": replica.number, "optimizer": optimizer, "rank": replica.rank}
    return {"clock": clock, "group": replica.group, **place}


def fingerprints_of(rows: Rows) -> Any:
    """Return the fingerprints of rows as they are now, without waiting for a GPU."""
    from .fingerprint import Fingerprints

    return Fingerprints([tensor for _, tensor in rows])


def write(
    files: FingerprintFiles, number: int, values: Dict[str, Any], rows: Rows, taken: Optional[bytes] = None
) -> None:
    """Write a record, unless there are no rows. ``taken`` are their fingerprints, if they are not those of now.

    Values that are the default are left out, then others until the text fits into a record.
    """
    if not rows:
        return
    kept = {key: value for key, value in values.items() if value or key in ("steps", "reductions", "forwards")}
    while len(json.dumps(kept, separators=(",", ":"))) > fingerprint_file.TEXT_SIZE:
        if kept.get("settings"):
            kept["settings"] = kept["settings"][: len(kept["settings"]) // 2]
        elif all(kept.pop(name, None) is None for name in _LONG):
            kept = {}  # otherwise the first of them that was there has been removed
    files.write(number, kept, [row for row, _ in rows], fingerprints_of(rows).value() if taken is None else taken)


Row = Tuple[Any, ...]  # as in the table of a fingerprint file: what, name, part, shape, dtype
Rows = List[Tuple[Row, Any]]  # each row with its tensor, or None if this rank has none now
_COMPILED = "_orig_mod."  # the part that torch.compile inserts into names
_SHARDED = "ZeroRedundancyOptimizer"  # with this optimizer each rank has the state of only some parameters


def held_by(optimizer: Any) -> List[Any]:
    """Return the parameters that an optimizer changes."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def named_parameters(replica: Replica) -> List[Tuple[str, Any]]:
    """Return the parameters that DDP keeps equal, tied ones once. Empty if the module is gone."""
    module = replica.module()
    found = module.named_parameters() if module is not None else ()
    return [(name.replace(_COMPILED, ""), tensor) for name, tensor in found if name not in replica.ignored]


def parameter_rows(named: List[Tuple[str, Any]]) -> Rows:
    """Return the parameters themselves."""
    return [(_row(fingerprint_file.PARAMETER, name, "", tensor), tensor) for name, tensor in named]


def gradient_rows(named: List[Tuple[str, Any]]) -> Rows:
    """Return the gradients of the parameters that are trained."""
    trained = [(name, tensor) for name, tensor in named if tensor.requires_grad or tensor.grad is not None]
    return [(_row(fingerprint_file.GRADIENT, name, "", tensor), tensor.grad) for name, tensor in trained]


def state_rows(named: List[Tuple[str, Any]], optimizer: Any) -> Rows:
    """Return the tensors of an optimizer's state; empty if the state is sharded over ranks."""
    import torch

    if any(kind.__name__ == _SHARDED for kind in type(optimizer).__mro__):
        return []
    states: Dict[Any, Any] = optimizer.state
    found = []
    for name, tensor in named:
        parts = states.get(tensor)
        for part, value in parts.items() if isinstance(parts, dict) else ():
            if isinstance(value, torch.Tensor):
                found.append((_row(fingerprint_file.STATE, name, str(part), value), value))
    return found


def buffer_rows(replica: Replica) -> Rows:
    """Return the buffers that DDP would broadcast if ``broadcast_buffers`` is on."""
    module = replica.module()
    found = module.named_buffers() if module is not None else ()
    named = [(name.replace(_COMPILED, ""), tensor) for name, tensor in found if name not in replica.ignored]
    return [(_row(fingerprint_file.BUFFER, name, "", tensor), tensor) for name, tensor in named]


def _row(what: str, name: str, part: str, tensor: Any) -> Row:
    return what, name, part, tuple(tensor.shape), str(tensor.dtype)[6:]  # without "torch."


_numbers: Any = weakref.WeakKeyDictionary()  # by optimizer: its number in the order of creation, from 1
_made = 0
_came_after: Any = None  # by parameter that a module got after the first optimizer: how many optimizers existed then


@guarded("optimizer made")
def made(optimizer: Any) -> None:
    """Count an optimizer that was made."""
    global _came_after, _made
    if here.ring is None:
        return
    _made += 1
    _numbers[optimizer] = _made
    if _made == 1:
        from torch.utils.weak import WeakTensorKeyDictionary

        _came_after = WeakTensorKeyDictionary()
        module = sys.modules["torch.nn.modules.module"]
        if hooks.has(module, "register_module_parameter_registration_hook"):
            module.register_module_parameter_registration_hook(_registered)
            hooks.write()


@guarded("optimizer made")
def _registered(_module: Any, _name: str, parameter: Any) -> None:
    """Note a parameter that a module gets. Returning None leaves the parameter unchanged."""
    if parameter is not None:
        _came_after[parameter] = _made


def optimizers() -> Any:
    """Return the existing optimizers, including those that have made no step."""
    return list(_numbers)


def is_later_than(parameter: Any, optimizer: Any) -> bool:
    """Return whether a module got a parameter only after an optimizer had been made."""
    return optimizer in _numbers and bool(_came_after.get(parameter, 0) >= _numbers[optimizer])


MAX_NAMES = 5
MAX_NAME = 120
# Checks in a row at which a parameter was unchanged. Our choice: one that is trained without an optimizer has changed
# by then.
MIN_STILL = 2
# Characters of a hyperparameter. Our choice: it cuts only two floats of full precision, as in unusual betas.
MAX_VALUE = 32
_SCALER_FILE = "grad_scaler.py"
# Fields to leave out when space runs short, the first one first.
_LONG = ("unfinished", "untrained", "replaced", "unreduced", "unwritten", "site")
_NO_SETTINGS = frozenset({"params", "param_names", "initial_lr"})

Values = Dict[str, Any]


def model_values(replica: Replica, named: List[Tuple[str, Any]], optimizers: List[Any]) -> Values:
    """Return the values of a model that are known at any time. ``optimizers`` are all that have stepped here."""
    ddp = replica.ddp()
    if ddp is not None:  # for a model that has ended, the last values stay
        replica.join = bool(getattr(getattr(ddp, "_join_config", None), "enable", False))
        # The communication hook that the script registered, or torch's own in C++.
        registered, logger, hook = getattr(ddp, "_comm_hooks", None), getattr(ddp, "logger", None), ""
        if registered:
            hook = getattr(registered[-1][0], "__qualname__", type(registered[-1][0]).__name__)
        elif logger is not None:
            hook = logger._get_ddp_logging_data().strs_map.get("comm_hook", "")
        replica.hook = str(hook)[:MAX_NAME]
    held = {id(tensor): tensor for optimizer in optimizers for tensor in held_by(optimizer)}
    modules = [other.module() for other in all_replicas()]
    known = {id(tensor) for module in modules if module is not None for tensor in module.parameters()}
    strays = [tensor for key, tensor in held.items() if key not in known]
    unheld = [(name, tensor) for name, tensor in named if tensor.requires_grad and id(tensor) not in held]
    unreduced = [name for name, tensor in named if tensor.requires_grad and id(tensor) not in replica.reduced]
    module = replica.module()
    import torch

    kind = torch.nn.modules.dropout._DropoutNd
    return {
        "reductions": replica.reductions,
        "random": random_digest(replica.on_gpu),
        "dropout": (
            module is not None and any(isinstance(m, kind) and m.training and m.p > 0 for m in module.modules())
        ),
        "unfinished": replica.unfinished["names"] if replica.unfinished else [],
        "unreduced": [name[:MAX_NAME] for name in unreduced[:MAX_NAMES]],
        "stray": len(strays),
        "unheld": len(unheld),
        "replaced": _replaced(unheld, strays, optimizers),
        "own_steps": getattr(replica, "own_steps", 0),
        "through": getattr(replica, "through", 0),
        "join": replica.join,
        "hook": replica.hook,
    }


def optimizer_values(optimizer: Any) -> Values:
    """Return the values of an optimizer that is making its step now.

    A hyperparameter of a later parameter group has the group's number as a prefix. Such a group has only its learning
    rate, and what differs from the first group.
    """
    first = _plain_settings(optimizer.param_groups[0])
    found = [[key, value] for key, value in first.items()]
    for number, group in enumerate(optimizer.param_groups[1:], 1):
        for key, value in _plain_settings(group).items():
            if key == "lr" or first.get(key) != value:
                found.append(["%d.%s" % (number, key), value])
    return {"optimizer": type(optimizer).__name__, "settings": found, "scale": _scale(sys._getframe(1))}


def _plain_settings(group: Dict[str, Any]) -> Dict[str, str]:
    texts = {str(key): _text(value) for key, value in group.items() if key not in _NO_SETTINGS}
    return {key: text for key, text in texts.items() if text is not None}


def _text(value: Any) -> Optional[str]:
    """Return a hyperparameter as text, or None if it is not set, is in GPU memory, or is no plain value."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if value is False:
        return None
    if isinstance(value, (tuple, list)):
        return " ".join(_text(part) or "-" for part in value[:4])[:MAX_VALUE]
    if isinstance(value, str):
        return hide_in_text(value[: 4 * MAX_VALUE])[:MAX_VALUE]
    return repr(value)[:MAX_VALUE] if isinstance(value, (int, float)) else None


def random_digest(on_gpu: bool) -> str:
    """Return a digest of torch's random state, including that of the current GPU."""
    import torch

    from .fingerprint import fingerprints

    states = [torch.get_rng_state()]
    if on_gpu and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return "-".join(fingerprints([state])[:6].hex() for state in states)


def _replaced(unheld: List[Tuple[str, Any]], strays: List[Any], optimizers: List[Any]) -> List[str]:
    """Return the first parameters for which an optimizer holds a tensor of the same shape that never had a gradient.

    Such a tensor is probably the parameter from before its layer was replaced. A tensor that is trained elsewhere has a
    gradient or optimizer state.
    """
    if not unheld:
        return []
    used = [optimizer.state for optimizer in optimizers if isinstance(optimizer.state, dict)]
    idle = [_kind(one) for one in strays if one.grad is None and not any(one in state for state in used)]
    found = []
    for name, tensor in unheld:
        if tensor.grad is not None and _kind(tensor) in idle:
            idle.remove(_kind(tensor))
            found.append(name[:MAX_NAME])
    return found[:MAX_NAMES]


def _kind(tensor: Any) -> Tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def _scale(frame: Any) -> Optional[float]:
    """Return the scale of the gradient scaler that is making this step; None if there is none or it is on a GPU."""
    for step in frames.outward(frame, frames.MAX_DEPTH):
        if step.f_code.co_name == "step" and step.f_code.co_filename.endswith(_SCALER_FILE):
            scale = getattr(step.f_locals.get("self"), "_scale", None)
            return float(scale) if scale is not None and scale.device.type == "cpu" else None
    return None
