"""Fingerprints a replica after an optimizer's step, at a forward, after a buffer broadcast, and at the end.

Nothing here communicates with other ranks, and nothing is left on a GPU or in autograd. With the fingerprints go values
as JSON, the fields of ``model.consistency.Values``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from . import frames, groups, hooks, replicas, schedule
from .replicas import Replica, all_replicas
from .schedule import FingerprintFiles, chosen
from .state import check_every, guarded, here
from .step_clock import in_backward, is_capturing
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
        # By name: the fingerprint of a parameter that no optimizer changes, and how many checks in a row it stayed.
        self._still: Dict[str, Tuple[bytes, int]] = {}
        self._forwards, self._unreduced = replica.before_step
        self._gradients: Rows = []
        self._taken: Any = None  # their ``fingerprint.Fingerprints``, read when the step has ended
        self._sample: Any = lambda: None  # a weak reference to one parameter that the optimizer changes
        self._left = (0, 0)  # the sample's version and address at the end of the last step
        self._between = 0
        self.follow(optimizer)

    def follow(self, optimizer: Any) -> None:
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
        """Return whether parameters changed more since the last step than between steps, as for a last evaluation."""
        sample, module = self._sample(), self.replica.module()
        if sample is None or module is None or not any(tensor is sample for tensor in module.parameters()):
            return True
        version, place = self._left
        return bool(sample.data_ptr() != place or sample._version - version > self._between)

    def take_before(self, optimizer: Any) -> None:
        self._gradients = gradient_rows(self._named(optimizer))
        self._taken = fingerprints_of(self._gradients)

    def take_after(self, number: int, optimizer: Any) -> None:
        """Write the record of step ``number``. Gradients that a closure computed are fingerprinted here."""
        if self._taken is None:
            self.take_before(optimizer)
        rows, gradients = self._gradients, self._taken
        self._gradients, self._taken = [], None
        replica, named = self.replica, named_parameters(self.replica)
        after = parameter_rows(named) + state_rows(self._named(optimizer), optimizer)
        if not replica.syncs_buffers:
            after += buffer_rows(replica)
        values = dict(
            model_values(replica, named, list(_steppers)), steps=number, forwards=replica.forwards - self._forwards,
            unreduced_forwards=replica.unreduced_forwards - self._unreduced,
            site=frames.describe_user(sys._getframe(1)), every=schedule.distance(),
        )  # fmt: skip
        values.update(optimizer_values(optimizer))
        before, taken = gradients.value(), fingerprints_of(after).value()
        # The parameters that get gradients but no optimizer changes. ``taken`` begins with ``named``.
        held = {id(tensor) for number in [*_numbers, *_steppers] for tensor in held_by(number)}
        still: Dict[str, Tuple[bytes, int]] = {}
        late: List[str] = []
        early: List[str] = []
        for i, (name, tensor) in enumerate(named):
            if id(tensor) in held or not tensor.requires_grad or tensor.grad is None:
                continue
            value = taken[i * fingerprint_file.FINGERPRINT_SIZE : (i + 1) * fingerprint_file.FINGERPRINT_SIZE]
            last, times = self._still.get(name, (b"", 0))
            still[name] = (value, times + 1 if value == last else 0)
            if still[name][1] >= MIN_STILL:
                (late if is_later_than(tensor, optimizer) else early).append(name[:MAX_NAME])
        self._still = still
        values.update(untrained=(late + early)[:MAX_NAMES], untrained_count=len(late + early), late=len(late))
        self.write(number, values, rows + after, before + taken)

    def write(self, number: int, values: Dict[str, Any], rows: Rows, taken: Optional[bytes] = None) -> None:
        """Write a record. An optimizer gets its number with the first."""
        if self._files is None:
            self.replica.optimizers += 1
            self._files = FingerprintFiles(_stream_facts(self.replica, fingerprint_file.STEP, self.replica.optimizers))
        write(self._files, number, values, rows, taken)


def _write_model(replica: Replica, clock: str, values: Dict[str, Any], rows: Rows) -> None:
    if clock not in replica.files:
        most = 1 if clock == fingerprint_file.END else fingerprint_file.MAX_SLOTS
        replica.files[clock] = FingerprintFiles(_stream_facts(replica, clock), most)
    write(replica.files[clock], replica.reductions, values, rows)


def _whole_model(replica: Replica, optimizers: List[Any], steps: int = 0) -> Tuple[Dict[str, Any], Rows]:
    """Return the values of a model since its last fingerprint at a forward, and all that DDP keeps equal by itself."""
    forwards, unreduced = replica.at_forward
    values = dict(
        model_values(replica, named_parameters(replica), optimizers), steps=steps,
        forwards=replica.forwards - forwards, unreduced_forwards=replica.unreduced_forwards - unreduced,
    )  # fmt: skip
    rows = parameter_rows(named_parameters(replica))
    return values, rows if replica.syncs_buffers else rows + buffer_rows(replica)


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


def _stream_facts(replica: Replica, clock: str, optimizer: int = 0) -> Dict[str, Any]:
    return {
        "clock": clock, "group": replica.group, "ranks": list(replica.ranks), "model": replica.number,
        "optimizer": optimizer, "rank": replica.rank,
    }  # fmt: skip


def fingerprints_of(rows: Rows) -> Any:
    """Return the fingerprints of rows as they are now, without waiting for a GPU."""
    from .fingerprint import Fingerprints

    return Fingerprints([tensor for _, tensor in rows])


def write(files: FingerprintFiles, number: int, values: Values, rows: Rows, taken: Optional[bytes] = None) -> None:
    """Write a record, if there are rows. Defaults are left out, then other values until the text fits into a record."""
    if not rows:
        return
    kept = {key: value for key, value in values.items() if value or key in ("steps", "reductions", "forwards")}
    while len(fingerprint_file.compact(kept)) > fingerprint_file.TEXT_SIZE:
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
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def named_parameters(replica: Any, names: str = "named_parameters") -> List[Tuple[str, Any]]:
    """Return the parameters that DDP keeps equal, tied ones once. Empty if the module is gone."""
    module = replica.module()
    found = getattr(module, names)() if module is not None else ()
    return [(name.replace(_COMPILED, ""), tensor) for name, tensor in found if name not in replica.ignored]


def parameter_rows(named: List[Tuple[str, Any]]) -> Rows:
    return [(_row_of(fingerprint_file.PARAMETER, *pair), pair[1]) for pair in named]


def gradient_rows(named: List[Tuple[str, Any]]) -> Rows:
    trained = [(name, tensor) for name, tensor in named if tensor.requires_grad or tensor.grad is not None]
    return [(_row_of(fingerprint_file.GRADIENT, name, tensor), tensor.grad) for name, tensor in trained]


def state_rows(named: List[Tuple[str, Any]], optimizer: Any) -> Rows:
    """Return the tensors of an optimizer's state; empty if the state is sharded over ranks."""
    if any(kind.__name__ == _SHARDED for kind in type(optimizer).__mro__):
        return []
    states = [(name, optimizer.state.get(tensor)) for name, tensor in named]
    parts = [(name, *item) for name, state in states if isinstance(state, dict) for item in state.items()]
    tensors = [(name, part, value) for name, part, value in parts if isinstance(value, torch.Tensor)]
    return [(_row_of(fingerprint_file.STATE, name, value, str(part)), value) for name, part, value in tensors]


def buffer_rows(replica: Any) -> Rows:
    """Return the buffers that DDP would broadcast if ``broadcast_buffers`` is on."""
    return [(_row_of(fingerprint_file.BUFFER, *pair), pair[1]) for pair in named_parameters(replica, "named_buffers")]


def _row_of(what: str, name: str, tensor: Any, part: str = "") -> Row:
    return what, name, part, tuple(tensor.shape), str(tensor.dtype)[6:]  # without "torch."


_numbers: Any = weakref.WeakKeyDictionary()  # by optimizer: its number in the order of creation, from 1
_made = 0
_came_after: Any = None  # by parameter that a module got after the first optimizer: how many optimizers existed then


@guarded("optimizer made")
def made(optimizer: Any) -> None:
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


def is_later_than(parameter: Any, optimizer: Any) -> bool:
    return optimizer in _numbers and bool(_came_after.get(parameter, 0) >= _numbers[optimizer])


MAX_NAMES = 5
MAX_NAME = 120
# Checks in a row at which a parameter was unchanged. Our choice: one that is trained otherwise has changed by then.
MIN_STILL = 2
# Characters of a hyperparameter. Our choice: it cuts only two floats of full precision, as in unusual betas.
MAX_VALUE = 32
_SCALER_FILE = "grad_scaler.py"
# Fields to leave out when space runs short, the first one first.
_LONG = ("unfinished", "untrained", "replaced", "unreduced", "unwritten", "site")
_NO_SETTINGS = frozenset({"params", "param_names", "initial_lr"})
Values = Dict[str, Any]


def model_values(replica: Any, named: List[Tuple[str, Any]], optimizers: List[Any]) -> Values:
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
    # Parameters for which an optimizer holds an untrained tensor of that shape, from before a replacement.
    used = [optimizer.state for optimizer in optimizers if isinstance(optimizer.state, dict)]
    unused = [t for t in strays if unheld and t.grad is None and not any(t in state for state in used)]
    idle, replaced = [(tensor.shape, tensor.dtype) for tensor in unused], []
    for name, tensor in unheld:
        if tensor.grad is not None and (tensor.shape, tensor.dtype) in idle:
            idle.remove((tensor.shape, tensor.dtype))
            replaced.append(name[:MAX_NAME])

    from .fingerprint import fingerprints

    states = [torch.get_rng_state()]
    if replica.on_gpu and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    kind = torch.nn.modules.dropout._DropoutNd
    parts = module.modules() if module is not None else ()
    return {
        "reductions": replica.reductions, "random": "-".join(fingerprints([state])[:6].hex() for state in states),
        "dropout": any(isinstance(m, kind) and m.training and m.p > 0 for m in parts),
        "unfinished": replica.unfinished["names"] if replica.unfinished else [],
        "unreduced": [name[:MAX_NAME] for name in unreduced[:MAX_NAMES]],
        "stray": len(strays), "unheld": len(unheld), "replaced": replaced[:MAX_NAMES],
        "own_steps": replica.own_steps, "through": replica.through, "join": replica.join, "hook": replica.hook,
    }  # fmt: skip


def optimizer_values(optimizer: Any) -> Values:
    """Return the values of an optimizer in its step: of later parameter groups, with a number, only what differs."""
    first = _plain_settings(optimizer.param_groups[0])
    groups_after = enumerate(optimizer.param_groups[1:], 1)
    later = [(number, *pair) for number, group in groups_after for pair in _plain_settings(group).items()]
    found = [[key, value] for key, value in first.items()]
    found += [["%d.%s" % (n, key), value] for n, key, value in later if key == "lr" or first.get(key) != value]
    # The scale of the gradient scaler that is making this step. On a GPU it is not read.
    above = frames.outward(sys._getframe(1), frames.MAX_DEPTH)
    scalings = (f for f in above if f.f_code.co_name == "step" and f.f_code.co_filename.endswith(_SCALER_FILE))
    scaling = next(scalings, None)
    scale = None if scaling is None else getattr(scaling.f_locals.get("self"), "_scale", None)
    scale = float(scale) if scale is not None and scale.device.type == "cpu" else None
    return {"optimizer": type(optimizer).__name__, "settings": found, "scale": scale}


def _plain_settings(group: Dict[str, Any]) -> Dict[str, str]:
    texts = {str(key): _hyperparameter_text(value) for key, value in group.items() if key not in _NO_SETTINGS}
    return {key: text for key, text in texts.items() if text is not None}


def _hyperparameter_text(value: Any) -> Optional[str]:
    """Return a hyperparameter as text, or None if it is not set, is in GPU memory, or is not a plain value."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if value is False:
        return None
    if isinstance(value, (tuple, list)):
        return " ".join(_hyperparameter_text(part) or "-" for part in value[:4])[:MAX_VALUE]
    if isinstance(value, str):
        return hide_in_text(value[: 4 * MAX_VALUE])[:MAX_VALUE]
    return repr(value)[:MAX_VALUE] if isinstance(value, (int, float)) else None


# Optimizers per model whose steps are fingerprinted. Our choice; some scripts have one optimizer per parameter.
MAX_STREAMS = 4
_OPTIMIZER_FILE = "optimizer.py"


class Stepper:
    """An optimizer that has stepped. It counts its steps, and decides which are fingerprinted."""

    def __init__(self, optimizer: Any) -> None:
        self.steps, self._due, self._is_due = 0, 1, False
        self.optimizer = weakref.ref(optimizer)
        self.seen = -1  # the version of the set of models for which ``models`` was found
        self.models: List[StepFingerprints] = []
        self.more: List[Any] = []  # of ``more_of``

    def begins(self) -> bool:
        auto = chosen()
        if auto is None:
            self._is_due = self.steps + 1 == self._due
        else:
            auto.step(time.perf_counter())
            self._is_due = schedule.is_between(self.steps, self.steps + 1)
            auto.taken += self._is_due
        return self._is_due

    def ended(self) -> bool:
        self.steps += 1
        if self.steps >= self._due:
            self._due = schedule.next_due(self.steps, schedule.fixed())
        is_due, self._is_due = self._is_due, False
        return is_due


class _Thread(threading.local):
    # The optimizer whose step this thread is making. If optimizers call others, it is the outermost.
    running: Optional[Stepper] = None


_steppers: Any = weakref.WeakKeyDictionary()  # by optimizer
_thread = _Thread()
# Functions that return what else is fingerprinted at the steps of an optimizer, like ``StepFingerprints``, or None.
more_of: List[Callable[[Any], Any]] = []


@guarded("replica before step")
def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    # There may be DDP models, or models without DDP on several ranks.
    group = groups.default() if here.is_rank and here.ring is not None else None
    several = replicas.is_recorded() or (group is not None and group.size() > 1 and bool(check_every()))
    running = _thread.running
    if not several:
        return
    # Whether an optimizer's step is still on the stack: one that raised has never reported its end.
    if running is not None and any(
        frame.f_code.co_filename.endswith(_OPTIMIZER_FILE) and running.optimizer() is frame.f_locals.get("self")
        for frame in frames.outward(sys._getframe(1))
    ):
        return
    stepper = _steppers.get(optimizer)
    if stepper is None:
        stepper = _steppers[optimizer] = Stepper(optimizer)
    _thread.running = stepper
    is_due, began_s = stepper.begins(), time.perf_counter()
    if is_due or stepper.seen != replicas.version():
        _find_models(stepper, optimizer)
        stepper.more = stepper.more or [inner for inner in (of(optimizer) for of in more_of) if inner is not None]
    for model in stepper.models:
        model.begins()
    # A closure will compute the gradients.
    has_closure = (len(args) > 1 and callable(args[1])) or kwargs.get("closure") is not None
    if is_due and not has_closure and may_fingerprint():
        for part in [*stepper.models, *stepper.more]:
            part.take_before(optimizer)
    if is_due:
        schedule.spend(began_s)


@guarded("replica after step")
def after_step(optimizer: Any) -> None:
    stepper = _thread.running
    if stepper is None or stepper.optimizer() is not optimizer:
        return
    _thread.running = None
    try:
        if stepper.ended() and may_fingerprint():
            began_s = time.perf_counter()
            for part in [*stepper.models, *stepper.more]:
                part.take_after(stepper.steps, optimizer)
            schedule.spend(began_s)
    finally:
        for model in stepper.models:
            model.ended(stepper.steps)


def _find_models(stepper: Stepper, optimizer: Any) -> None:
    """Find the models whose parameters an optimizer holds; none if it steps in backward: ranks' orders may differ."""
    stepper.seen = replicas.version()
    if in_backward() or any(hasattr(p, "_in_backward_optimizers") for p in held_by(optimizer)):
        stepper.models = []
        return
    held = {id(tensor) for tensor in held_by(optimizer)}
    known = {model.replica: model for model in stepper.models}
    stepper.models = []
    for replica in replicas.all_replicas():
        module = replica.module()
        if module is None or not any(id(tensor) in held for tensor in module.parameters()):
            continue
        if replica in known:
            known[replica].follow(optimizer)
            stepper.models.append(known[replica])
        elif len(_step_fingerprints_of(replica)) < MAX_STREAMS:
            stepper.models.append(StepFingerprints(replica, optimizer))
    if not stepper.steps and not known:  # what it holds besides DDP's parameters, starting before its first step
        of_ddp = {id(tensor) for replica in replicas.all_replicas() for tensor in replica.module().parameters()}
        found = replicas.find_unwrapped(held_by(optimizer), of_ddp)
        if found is not None and may_fingerprint():
            model = StepFingerprints(found, optimizer)
            values = dict(model_values(found, [], []), steps=0, forwards=0, unreduced_forwards=0)
            model.write(0, values, parameter_rows(named_parameters(found)))
            stepper.models.append(model)
    stepper.models += [model for model in known.values() if isinstance(model.replica, replicas.Unwrapped)]


def _step_fingerprints_of(replica: Replica) -> List[StepFingerprints]:
    return [m for stepper in list(_steppers.values()) for m in stepper.models if m.replica is replica]


@guarded("replica forward")
def forward_begins(ddp: Any) -> None:
    replica = replicas.find(ddp)
    if replica is None or not torch.is_grad_enabled():
        return
    if not schedule.is_between(replica.forward_taken, replica.reductions):
        return
    replica.forward_taken = replica.reductions
    if not _step_fingerprints_of(replica) and may_fingerprint():
        values, rows = _whole_model(replica, list(_steppers))
        _write_model(replica, fingerprint_file.FORWARD, dict(values, site=frames.describe_user(sys._getframe(1))), rows)
        replica.at_forward = (replica.forwards, replica.unreduced_forwards)


@guarded("replica buffers")
def buffers_synced(ddp: Any) -> None:
    """Fingerprint the buffers that DDP has just broadcast. Not with a hook of the script, which may send them later."""
    replica = replicas.find(ddp)
    if replica is None or hasattr(ddp, "buffer_hook"):
        return
    if schedule.is_between(replica.sync_taken, replica.reductions) and may_fingerprint():
        replica.sync_taken, began_s = replica.reductions, time.perf_counter()
        values = {"steps": 0, "reductions": replica.reductions, "forwards": 0, "unreduced_forwards": 0}
        _write_model(replica, fingerprint_file.SYNC, values, buffer_rows(replica))
        schedule.spend(began_s)


@guarded("replica ends")
def model_ended(replica: Replica) -> None:
    """Fingerprint a trained model one last time, unless an error ended training or the model was edited since."""
    last: Optional[StepFingerprints] = replica.last_stepped
    trained = replica.reductions or last is not None
    if replica.ended or not trained or sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None:
        return
    replica.ended = True
    if (last is not None and last.is_edited()) or (replica.on_gpu and not gpu_is_idle()):
        return
    if may_fingerprint():  # the optimizers may be gone already
        values, rows = _whole_model(replica, [], last.steps if last is not None else 0)
        _write_model(replica, fingerprint_file.END, dict(values, stray=0, unheld=0), rows)


@guarded("replicas end")
def group_ends(group: Any = None) -> None:
    """Fingerprint the models of a process group that is about to be destroyed; all models if ``group`` is None."""
    wanted = None if group is None or group is groups.default() else str(group.group_name)
    for replica in replicas.all_replicas():
        if wanted in (None, replica.group):
            model_ended(replica)


os.register_at_fork(after_in_child=_steppers.clear)
