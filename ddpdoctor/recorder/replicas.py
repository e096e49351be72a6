"""The models of this process that have copies on other ranks, and how often each was run and reduced.

A forward with gradients arms DDP's reducer. Only the next backward that reaches the model is reduced, until another
such forward. So reductions are counted as the reducer makes them: one for several forwards, one for a graph that is
kept for a second backward, and none for a forward under ``no_sync``, wherever its backward runs.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Set, Tuple

import torch

from . import frames, groups, steps
from .state import check_every, guarded, here, pass_on, shielded
from .step_clock import in_backward
from .storage.fingerprint_file import compact, packed

# Parameters whose gradients show whether a backward reached their model, if several models are possible. Our choice:
# nearly any backward uses the first, the last, or one of two between them.
MARKS = 4
# Changes between finished and unfinished that are noted. A loop with several backwards per forward changes every step.
MAX_UNFINISHED_NOTES = 16
on_gone: List[Callable[[Replica], None]] = []  # called with a model that ends, while its module still exists


class Model:
    """What is kept about a model that has copies on other ranks."""

    on_gpu = join = ended = False
    hook = ""  # The communication hook as last seen. The script may register one at any time.
    syncs_buffers = True  # whether DDP broadcasts rank 0's buffers before forwards, or there are none to compare
    ignored: FrozenSet[str] = frozenset()
    unfinished: Any = None  # what the reducer still waits for after the last backward; None if all was reduced
    forwards = unreduced_forwards = 0  # forwards with gradients, counted over the model's lifetime
    # All forwards and unreduced ones, up to the last step of any optimizer that holds parameters of the model.
    before_step = (0, 0)
    reductions = 0
    optimizers = 0  # how many optimizers have stepped with its parameters
    last_stepped: Any = None  # the ``StepFingerprints`` of the optimizer that stepped last
    own_steps = 0  # steps right after a backward that reached no DDP model, so the model has its own loss
    through = 0  # backwards that reached a DDP model and also this one, or that ran while this one was frozen

    def __init__(self, group: Any, number: int) -> None:
        self.group = str(group.group_name)
        self.ranks = tuple(int(rank) for rank in groups.c10d.get_process_group_ranks(group))
        self.rank = int(groups.c10d.get_rank())
        self.number = number  # the model's number within its group, counted from 1

    def marked(self) -> List[Any]:
        """Return parameters whose gradients show whether a backward has reached the model."""
        raise NotImplementedError

    def grad_mark(self) -> Any:
        """Return a value that changes when a backward changes gradients of the model."""
        marked = self.marked()
        grads = [p.grad for p in marked[:: max(1, len(marked) // (MARKS - 1))] + marked[-1:]]
        return [id(g) if g is None or g.is_sparse else (g.data_ptr(), g._version) for g in grads]


class Replica(Model):
    """What is kept about one DDP model."""

    def __init__(self, ddp: Any, number: int) -> None:
        super().__init__(ddp.process_group, number)
        self.ddp = weakref.ref(ddp, shielded("replica ends", functools.partial(_gone, _kept, id(ddp))))
        self._module = weakref.ref(ddp.module)
        self.ignored = frozenset(getattr(ddp.module, "_ddp_params_and_buffers_to_ignore", ()))
        named = ddp.module.named_parameters()
        # Ids of the parameters that DDP reduces. DDP keeps them alive, so no other tensor gets their ids.
        self.reduced = frozenset(id(p) for name, p in named if p.requires_grad and name not in self.ignored)
        self.on_gpu = getattr(ddp, "device_type", "cpu") != "cpu"
        self.syncs_buffers = bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)))
        # The backwards with reductions when it was last fingerprinted at a forward, and after a buffer broadcast.
        self.forward_taken, self.sync_taken = 0, -1
        self.at_forward = (0, 0)  # all forwards and unreduced ones when it was last fingerprinted at one
        self.files: Dict[str, Any] = {}  # by clock: the ``FingerprintFiles`` of the model's own events

    def marked(self) -> List[Any]:
        ddp = self.ddp()
        return [p for p in ddp._module_parameters if p.requires_grad] if ddp is not None else []

    def module(self) -> Any:
        """Return the wrapped module, which the script may replace and which outlives DDP; None if it is gone."""
        ddp = self.ddp()
        return self._module() if ddp is None else ddp.module


class _Kept:
    """The models of this process. They belong to one ring, so a forked child does not use its parent's."""

    def __init__(self) -> None:
        self.ring = here.ring
        self.by_id: Dict[int, Replica] = {}
        self.numbers: Dict[str, int] = {}
        self.armed: Dict[int, Replica] = {}
        self.marks: List[Tuple[int, Any]] = []
        self.unfinished: Dict[int, Replica] = {}
        self.version = 0  # changes with the set of models
        self.unwrapped: List[Unwrapped] = []  # replaced, never changed in place
        self.last_reduced = True  # whether the last backward reached a DDP model, or was not checked


_kept = _Kept()
_unfinished_notes = 0


def _kept_here() -> _Kept:
    """Return what is kept about models, which is nothing yet in a forked child."""
    global _kept
    if _kept.ring is not here.ring:
        _kept = _Kept()
    return _kept


def is_recorded() -> bool:
    return bool(_kept_here().by_id)


def version() -> int:
    return _kept.version


def all_replicas() -> List[Replica]:
    return list(_kept_here().by_id.values())


def find(ddp: Any) -> Optional[Replica]:
    return _kept_here().by_id.get(id(ddp))


def register(ddp: Any) -> None:
    if here.ring is None or not here.is_rank or not check_every():
        return
    if len(groups.c10d.get_process_group_ranks(ddp.process_group)) < 2:
        return
    kept, group = _kept_here(), str(ddp.process_group.group_name)
    number = kept.numbers[group] = kept.numbers.get(group, 0) + 1
    kept.by_id[id(ddp)] = Replica(ddp, number)
    kept.version += 1


def _gone(kept: _Kept, key: int, reference: Any, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """Check a model that ends one last time, and forget it. Do nothing at interpreter exit, when torch is half gone."""
    replica = kept.by_id.get(key)
    if is_ending() or replica is None or replica.ddp is not reference:
        return
    try:
        if kept.ring is here.ring:
            for action in on_gone:
                action(replica)
    finally:
        del kept.by_id[key]
        kept.armed.pop(key, None)
        kept.unfinished.pop(key, None)
        kept.version += 1


@guarded("replica forward")
def forward_ended(ddp: Any) -> None:
    replica = find(ddp)
    if replica is None or not torch.is_grad_enabled():
        return
    replica.forwards += 1
    if ddp.require_backward_grad_sync:
        _kept.armed[id(ddp)] = replica
    else:
        replica.unreduced_forwards += 1


def backward_begins() -> None:
    others = _kept_here().unwrapped
    if (len(_kept.armed) > 1 or others) and not in_backward():
        for model in others:
            model.mark = model.grad_mark()
        _kept.marks = [(key, replica.grad_mark()) for key, replica in _kept.armed.items()]


def backward_ended(*unused: Any, **also_unused: Any) -> None:
    """Count a reduction of each armed model that a backward reached. A nested one, as in checkpoints, reduces none."""
    others = _kept_here().unwrapped
    if not (_kept.armed or _kept.unfinished or others) or in_backward():
        return
    marks, _kept.marks = _kept.marks, []
    reached = [key for key, mark in marks if key in _kept.armed and _kept.armed[key].grad_mark() != mark]
    of_others = [model for model in others if model.grad_mark() != model.mark]
    if not reached and not of_others:
        reached = list(_kept.armed)
    ended = [_kept.armed.pop(key) for key in reached]
    _kept.last_reduced = bool(ended)
    for model in _kept.unwrapped if ended else ():
        first = next(model.parameters(), None)
        model.through += model in of_others or (first is not None and not first.requires_grad)  # frozen at present
    for replica in ended:
        replica.reductions += 1
    for replica in {*ended, *_kept.unfinished.values()}:
        _look_at_reducer(replica, sys._getframe(1))


@guarded("reducer")
def _look_at_reducer(replica: Replica, frame: Any) -> None:
    """Note that a backward left gradients out, or that a later one delivered them."""
    global _unfinished_notes
    ddp = replica.ddp()
    if ddp is None or not (_unfinished_notes < MAX_UNFINISHED_NOTES or replica.unfinished):
        return
    before, replica.unfinished = replica.unfinished, steps.unfinished(ddp)
    if replica.unfinished:
        _kept.unfinished[id(ddp)] = replica
    else:
        _kept.unfinished.pop(id(ddp), None)
    if replica.unfinished != before and here.ring is not None and _unfinished_notes < MAX_UNFINISHED_NOTES:
        _unfinished_notes += 1
        line: Dict[str, Any] = {"frame": frames.describe_user(frame)} if replica.unfinished else {}
        here.note("unfinished", **(replica.unfinished or {}), group=replica.group, model=replica.number, **line)


# Per process. Our choice: a GAN has one or two besides DDP, and one optimizer per parameter would make very many.
MAX_MODELS = 4
# Frames above the step that are searched for the model. Our choice: trainers call their optimizers ten or so deep.
MAX_DEPTH = 24
MAX_VALUES = 200  # Variables of a frame that are searched for modules. Our choice.
Named = List[Tuple[str, Any]]


class Unwrapped(Model):
    """A model that no DDP holds: parameters of an optimizer, by their names in the script's modules.

    Whether it should be equal on all ranks is judged from what they do: if all step with the same gradients, these were
    exchanged.
    """

    mark: Any = None  # what ``grad_mark`` returned before the backward

    def __init__(self, named: Named, number: int) -> None:
        super().__init__(groups.default(), -number)  # negative, because it is no DDP model
        self.reduced = frozenset(id(tensor) for _, tensor in named)
        self._held = [(name, weakref.ref(tensor)) for name, tensor in named]

    def ddp(self) -> Any:
        return None

    def module(self) -> Any:
        return self

    def named_parameters(self) -> Iterator[Tuple[str, Any]]:
        for name, reference in self._held:
            tensor = reference()
            if tensor is not None:
                yield name, tensor

    def parameters(self) -> Iterator[Any]:
        return (tensor for _, tensor in self.named_parameters())

    def modules(self) -> Iterator[Any]:
        return iter(())

    def stepped(self, steps: int) -> None:
        """Note a step of its optimizer. Steps also count as reductions, because without a reducer none are counted."""
        self.reductions = steps
        self.own_steps += not _kept.last_reduced

    def marked(self) -> List[Any]:
        return list(self.parameters())[:1]


def find_unwrapped(tensors: List[Any], known: Any) -> Optional[Unwrapped]:
    """Make a model of an optimizer's tensors that are not in ``known``, the ids of DDP's; None if not recorded."""
    kept = _kept_here()
    own = [tensor for tensor in tensors if id(tensor) not in known]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in own)
    if not own or not plain or len(kept.unwrapped) >= MAX_MODELS:
        return None
    # Their names: the script's variable and the path in its module, or else their position.
    names: Dict[int, str] = {}
    wanted = {id(tensor) for tensor in own}
    for frame in frames.outward(sys._getframe(1), MAX_DEPTH):
        if len(names) == len(wanted):
            break
        # Its variables, and the attributes of the object whose method it runs.
        spaces = [frame.f_locals, getattr(frame.f_locals.get("self"), "__dict__", {})]
        pairs = [pair for space in spaces for pair in list(space.items())[:MAX_VALUES]]
        modules = [(v, m) for v, m in pairs if isinstance(m, torch.nn.Module) and v != "self"]
        for name, tensor in (pair for variable, module in modules for pair in module.named_parameters(variable)):
            if id(tensor) in wanted:
                names.setdefault(id(tensor), name)
    named = [(names.get(id(tensor), "parameter %d" % i), tensor) for i, tensor in enumerate(own)]
    found = Unwrapped(named, len(kept.unwrapped) + 1)
    kept.unwrapped = [*kept.unwrapped, found]
    if here.ring is not None:  # as many as fit in a quarter of what a DDP model gets
        rows = [_tensor_row("p", name, tensor) for name, tensor in named]
        here.ring.note({"k": "named", "rows": _packed_rows(rows, MAX_ROWS_BYTES // 4)})
    return found


# Constructions of DDP that are noted. Our choice: with digests alone they take 64 KiB of the journal's 512.
MAX_MODEL_NOTES = 256
# Room for the rows of one model. Our choice: 2,000 parameters named as in a transformer take about 8 KiB.
MAX_ROWS_BYTES = 48 * 1024
MAX_ALL_ROWS_BYTES = 192 * 1024  # Room for the rows of all models of a process. Later models get only a digest.
_model_digests: Set[str] = set()
_models_noted = 0
_rows_bytes = 0


def note_model(module: Any, group: Any, with_buffers: bool, finds_unused: bool) -> None:
    """Write what must be equal on all ranks of ``group``; of a model that was seen before only its digest."""
    global _models_noted, _rows_bytes
    if here.ring is None or _models_noted >= MAX_MODEL_NOTES:
        return
    _models_noted += 1
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    rows = [_tensor_row("p", name, tensor) for name, tensor in module.named_parameters() if name not in ignored]
    if with_buffers:
        rows += [_tensor_row("b", name, tensor) for name, tensor in module.named_buffers() if name not in ignored]
    digest = hashlib.sha256(compact(rows)).hexdigest()[:24]
    entry: Dict[str, Any] = {"group": str(group.group_name), "count": len(rows), "digest": digest}
    if digest not in _model_digests:
        fitting = _packed_rows(rows, min(MAX_ROWS_BYTES, MAX_ALL_ROWS_BYTES - _rows_bytes))
        if fitting is not None:
            entry["rows"] = fitting
            _rows_bytes += len(fitting)
    if here.note("ddp", **entry, finds_unused=int(finds_unused), frame=frames.describe_user(sys._getframe())):
        _model_digests.add(digest)


def _tensor_row(kind: str, name: str, tensor: Any) -> List[Any]:
    try:
        shape = list(tensor.shape)
    except RuntimeError as error:  # a parameter of a lazy module has no shape yet
        pass_on(error)
        shape = None
    return [kind, name, shape, str(tensor.dtype).replace("torch.", ""), int(tensor.requires_grad)]


def _packed_rows(rows: List[Any], space: int) -> Optional[str]:
    """Return as many of the first rows as fit, compressed, or None if not even a few fit."""
    while True:
        found = packed(rows)
        if len(found) <= space:
            return found
        if len(rows) < 16:
            return None
        rows = rows[: len(rows) // 2]
