"""Records the phases of training: making groups, building DDP, forward, backward, steps, batches, epochs, saves."""

from __future__ import annotations

import itertools
import os
import sys
import time
import weakref
from typing import Any, Callable

from . import calls, detail, frames, gradients, groups, hooks, loaders, replicas, steps, surroundings, triggers
from . import fingerprinting as made
from . import mesh as mesh_replicas
from .errors import noting_errors
from .state import (
    JOINED_VARIABLE,
    MASTER_VARIABLE,
    guarded,
    here,
    is_below_trainer,
    pass_on,
    sealed,
    store_address,
    wall,
)
from .step_clock import clock, enter_phase, leave_phase
from .storage import ring_layout
from .wrappers import around, hide_own_frames, wraps

MAX_BAD_ENDS = 64
"""Children other than ranks whose bad end is noted. Our choice: terminating a pool ends all of its workers badly."""

_bad_ends = 0
_steps = itertools.count(1)
_inner: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that step as a part of another optimizer; their steps are not counted."""
_batches = itertools.count(1)
_epochs = itertools.count(1)


def count(cell: str, counter: Any) -> None:
    """Set a cell to the next number."""
    if here.ring is not None:
        here.ring.set(cell, next(counter))


def phase(
    op: str, *, waits: bool = False, before: Any = None, after: Any = None, name: Any = None, group: Any = None
) -> Any:
    """Return a decorator that puts a record around a function.

    ``group`` returns the process group in which DDP's C++ makes collectives meanwhile, or None if it makes none.
    """
    note_end = guarded(op)(after) if after is not None else None

    def decorate(original: Any) -> Any:
        @wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            index = 0
            try:
                if before is not None:
                    before(*args, **kwargs)
                number, begun = groups.begun_in(group(*args, **kwargs) if group is not None else None)
                index = calls.begin(name(*args) if name is not None else op, number, begun)
            except Exception as error:
                if not sealed[wall.gi_running][op, error]:
                    raise
            waiting = False
            try:
                waiting = enter_phase() if waits else False
                result = original(*args, **kwargs)
                calls.ended(index)
            except BaseException as error:
                sealed[wall.gi_running][calls.failed, index, op, error]
                raise
            finally:
                if waiting:
                    sealed[wall.gi_running][leave_phase,]
            if note_end is not None:
                note_end(*args, **kwargs)
            return result

        return recorded

    return decorate


def patch_groups(module: Any) -> None:
    """Patch torch.distributed.distributed_c10d: collectives, and making and destroying groups."""
    detail.keep_helpers(module)
    calls.patch(module)
    calls.patch_objects(module)
    init = phase("init_process_group", waits=True, before=_before_init, after=_after_init)
    hooks.put(module, "init_process_group", init)
    hooks.put(module, "new_group", phase("new_group", waits=True))
    hooks.put(module, "destroy_process_group", phase("destroy_process_group", before=_before_destroy))
    detail.make_safe(module)
    _note_what_evidence_needs(module)


def _note_what_evidence_needs(module: Any) -> None:
    """Note whether this torch has the attributes that the evidence about groups is read from."""
    hooks.note_modules(sys.modules["torch"], [name for name in hooks.patches if name.startswith("torch.")])
    world = hooks.part(module, "_world")
    for name in ("default_pg", "pg_group_ranks", "pg_map", "pg_names"):
        hooks.has(type(world), name)
    for name in ("_get_sequence_number_for_group", "_get_backend", "_device_types"):
        hooks.has(module.ProcessGroup, name)
    native = sys.modules["torch._C._distributed_c10d"]
    hooks.note("flight recorder", any(hasattr(native, name) for name in groups.FLIGHT_RECORDERS))


def _before_destroy(group: Any = None) -> None:
    if group is None or group is groups.default():
        groups.note_device_times()
    triggers.group_ends(group)
    loaders.settle_all()
    gradients.settle_all()
    steps.settle_all()
    detail.forget_helpers(group)
    if here.is_rank and (group is None or group is groups.default()):
        os.environ.pop(JOINED_VARIABLE, None)
        if here.ring is not None:
            here.ring.note({"k": "destroyed", "at": time.monotonic_ns()})


def _before_init(*args: Any, **kwargs: Any) -> None:
    names = ("backend", "init_method", "timeout", "world_size", "rank")
    given = dict(zip(names, args))
    given.update(kwargs)
    _leave_agent_store(given.get("init_method"))
    if not is_below_trainer():
        here.promote()
    groups.turn_on_flight_recorders()
    if here.ring is None:
        return
    entry = {"k": "init", "at": time.monotonic_ns()}
    for name, variable in (("world_size", "WORLD_SIZE"), ("rank", "RANK")):
        value = given.get(name)
        if not isinstance(value, int) or value < 0:
            value = int(os.environ[variable]) if os.environ.get(variable, "").isdigit() else None
        entry[name] = value
    entry["meeting"] = _meeting_file(given.get("init_method"))
    here.ring.note(dict(entry, timeout_s=groups.init_timeout_s(given.get("backend"), given.get("timeout"))))


def _meeting_file(init_method: Any) -> Any:
    """Return path and size of the file in which ranks meet, before this one opens it; None if they use none."""
    if not isinstance(init_method, str) or not init_method.startswith("file://"):
        return None
    path = init_method[len("file://") :].partition("?")[0]
    try:
        return {"path": path, "size_bytes": os.stat(path).st_size}
    except OSError as error:
        pass_on(error)
        return {"path": path, "size_bytes": 0}


def _leave_agent_store(init_method: Any) -> None:
    """Let a script that starts its own ranks at its own address create a store there.

    The agent's ranks know from their environment that the agent has the store. Their children inherit that, and would
    wait forever for a store that nobody creates.
    """
    address = store_address()
    if isinstance(init_method, str) and init_method.startswith("tcp://"):
        address = init_method[len("tcp://") :].partition("?")[0].rstrip("/")
    given = os.environ.get(MASTER_VARIABLE, address)
    same = given.replace("localhost", "127.0.0.1") == address.replace("localhost", "127.0.0.1")
    if not here.is_rank and not same:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _after_init(*args: Any, **kwargs: Any) -> None:
    if here.ring is None:
        return
    world = {"rank": groups.c10d.get_rank(), "world_size": groups.c10d.get_world_size()}
    torch_says = {"backend": groups.backends_of(groups.default()), "debug_level": groups.c10d.get_debug_level().name}
    here.ring.note(dict(world, k="initialized", at=time.monotonic_ns(), **torch_says))
    here.ring.set("initialized", 1)
    if here.is_rank:
        os.environ[JOINED_VARIABLE] = str(os.getpid())


def join_running_group() -> None:
    """Note a default group that was made before the hooks went in, as if it were made now."""
    if groups.default() is not None:
        _before_init(world_size=groups.c10d.get_world_size(), rank=groups.c10d.get_rank())
        _after_init()


def patch_ddp(module: Any) -> None:
    """Patch torch.nn.parallel.distributed: construction and forward."""
    ddp = module.DistributedDataParallel
    code = ddp.__init__.__code__
    positions = {name: i for i, name in enumerate(code.co_varnames[: code.co_argcount])}

    def given(name: str, args: Any, kwargs: Any) -> Any:
        i = positions.get(name, len(args))
        return kwargs[name] if name in kwargs else args[i] if i < len(args) else None

    def group_of(*args: Any, **kwargs: Any) -> Any:
        mesh = given("device_mesh", args, kwargs)
        own = mesh.get_group(mesh_dim=0) if mesh is not None else given("process_group", args, kwargs)
        return own if own is not None else groups.default()

    def before(*args: Any, **kwargs: Any) -> None:
        group = group_of(*args, **kwargs)
        detail.constructing.group = group
        syncs_buffers = given("broadcast_buffers", args, kwargs) is not False
        finds_unused = bool(given("find_unused_parameters", args, kwargs))
        replicas.note_model(given("module", args, kwargs), group, syncs_buffers, finds_unused)

    steps.patch_ddp(ddp)
    surroundings.watch_collections()
    gradients.patch_ddp(ddp)
    hooks.put(ddp, "__init__", phase("ddp_init", waits=True, before=before, after=_after_ddp, group=group_of))
    forward = phase("ddp_forward", before=_before_forward, name=_forward_name, group=_forward_group)
    hooks.put(ddp, "forward", forward)
    hooks.put(ddp, "_post_forward", lambda original: around(original, after=replicas.forward_ended))
    hooks.put(ddp, "_sync_buffers", lambda original: around(original, after=_buffers_synced))
    steps.note_what_is_needed(sys.modules["torch._C._distributed_c10d"])


def _before_forward(*args: Any, **kwargs: Any) -> None:
    began_ns = time.monotonic_ns()
    triggers.forward_begins(*args, **kwargs)
    loaders.forward_begins(args[0], args[1:], kwargs)
    clock.leave_out(began_ns)


def _buffers_synced(ddp: Any) -> None:
    began_ns = time.monotonic_ns()
    triggers.buffers_synced(ddp)
    clock.leave_out(began_ns)


def _before_backward(*args: Any, **kwargs: Any) -> None:
    replicas.backward_begins(*args, **kwargs)
    loaders.backward_begins()


def _forward_name(*args: Any) -> str:
    import torch

    return "ddp_forward" if torch.is_grad_enabled() and args[0].training else "ddp_forward_no_grad"


def _forward_group(*args: Any, **kwargs: Any) -> Any:
    if args[0].training and args[0].require_backward_grad_sync:
        steps.will_reduce(args[0])
    return args[0].process_group


def _backward_group(*args: Any, **kwargs: Any) -> Any:
    ddp = steps.model_to_reduce()
    return ddp.process_group if ddp is not None else None


def _after_ddp(*args: Any, **kwargs: Any) -> None:
    detail.constructing.group = None
    steps.keep_names(args[0])
    replicas.register(args[0])


def patch_autograd(module: Any) -> None:
    """Put a record around torch.autograd.backward, which Tensor.backward calls too."""
    steps.patch_autograd(module)
    gradients.patch_autograd(module)
    after = replicas.backward_ended
    backward = phase("backward", waits=True, before=_before_backward, after=after, group=_backward_group)
    hooks.put(module, "backward", backward)


def patch_optimizer(module: Any) -> None:
    """Count optimizer steps with torch's global hooks for them."""

    @guarded("optimizer step")
    def begins(optimizer: Any, *unused: Any) -> None:
        inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer steps through an inner optimizer
        if isinstance(inner, module.Optimizer):
            _inner.add(inner)

    @guarded("optimizer step")
    def looks(optimizer: Any, args: Any, kwargs: Any) -> None:
        began_ns = time.monotonic_ns()
        triggers.before_step(optimizer, args, kwargs)
        mesh_replicas.before_step(optimizer, args, kwargs)
        gradients.before_step(optimizer, args, kwargs)
        surroundings.hand_made_step(optimizer)
        clock.leave_out(began_ns)
        steps.optimizer_begins(optimizer)

    @guarded("optimizer step")
    def stepped(optimizer: Any, *unused: Any) -> None:
        if optimizer not in _inner:
            count("steps", _steps)
        steps.stepped(optimizer)
        began_ns = time.monotonic_ns()
        triggers.after_step(optimizer)
        mesh_replicas.after_step(optimizer)
        clock.leave_out(began_ns)

    made.patch_optimizer(module)
    if hooks.has(module, "register_optimizer_step_pre_hook"):
        for before in (begins, looks):
            module.register_optimizer_step_pre_hook(before)
    if hooks.has(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(stepped)


def patch_loader(module: Any) -> None:
    """Patch torch.utils.data.dataloader: batches and epochs."""
    loaders.patch(module)
    hooks.put(hooks.part(module, "_BaseDataLoaderIter"), "__next__", _next_batch)
    hooks.put(module.DataLoader, "__iter__", phase("epoch", after=lambda *a: count("epochs", _epochs)))
    loaders.note_fetchers(sys.modules.get(loaders.FETCH_MODULE))


def _note_workers(ring: Any, iterator: Any) -> None:
    """Write how many workers the loader has that training takes batches from, plus 1: 0 means that it is not known."""
    workers = getattr(iterator, "_num_workers", None)
    if workers is not None and workers != clock.workers and sys.modules["torch"].is_grad_enabled():
        clock.workers = workers
        ring.set("loader_workers", workers + 1)


def _next_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``__next__`` of a loader's iterator with a record around it, and a check of the batch."""

    @wraps(original)
    def recorded(self: Any) -> Any:
        index, loading = 0, None
        try:
            loading = clock.begin_data()
            try:
                index = calls.begin("next_batch", seq=groups.look_up(None)[2])
            except Exception as error:
                if not sealed[wall.gi_running]["next_batch", error]:
                    raise
            batch = original(self)
        except StopIteration as end:
            sealed[wall.gi_running][clock.end_data, loading]
            sealed[wall.gi_running][hide_own_frames, end]
            sealed[wall.gi_running][calls.ended, index]
            sealed[wall.gi_running][loaders.exhausted, self]
            raise
        except BaseException as error:
            sealed[wall.gi_running][clock.end_data, loading]
            sealed[wall.gi_running][calls.failed, index, "next_batch", error]
            raise
        try:
            clock.end_data(loading)
            ring = here.ring
            calls.ended(index)
            if index and ring is not None:
                ring.set("batches", next(_batches))
                _note_workers(ring, self)
                loaders.delivered(self, batch)
        except BaseException as error:
            clock.loading = False
            sealed[wall.gi_running][calls.ended, index]
            if not sealed[wall.gi_running]["next_batch", error]:
                raise
        return batch

    return recorded


def patch_spawn(module: Any) -> None:
    """Note the exception of a rank that mp.spawn started. torch catches it and passes on only its text."""
    hooks.put(module, "_wrap", _noting)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _wrap(function: Any, *args: Any, **kwargs: Any) -> Any:
        return original(noting_errors(function), *args, **kwargs)

    return _wrap


def patch_popen(module: Any) -> None:
    """Note how children of multiprocessing ended. Only their parent learns that."""
    original = module.Popen.poll

    @wraps(original)
    def poll(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = self.returncode is not None
        code = original(self, *args, **kwargs)
        if code is not None and not known:
            _child_ended(self.pid, code)
        return code

    module.Popen.poll = poll


@guarded("child ends")
def _child_ended(pid: int, code: int) -> None:
    """Note the end of a child that was a rank, and the first few bad ends of others, which may be thousands."""
    global _bad_ends
    if here.ring is None:
        return
    if not _was_rank(pid):
        _bad_ends += code != 0
        if code == 0 or _bad_ends > MAX_BAD_ENDS:
            return
    here.ring.note({"k": "child_end", "pid": pid, "code": code, "at": time.monotonic_ns()})


def _was_rank(pid: int) -> bool:
    """Return whether a process that has ended left the ring of a rank."""
    rings = os.path.join(here.folder, "rings")
    names = [name for name in os.listdir(rings) if name.startswith("%d-" % pid)]
    return any(os.path.getsize(os.path.join(rings, name)) == ring_layout.RANK_SHAPE.total_bytes for name in names)


def patch_dynamo(module: Any) -> None:
    """Make torch.compile skip the recorder's frames, as it skips torch's own."""
    if hooks.has(module, "SKIP_DIRS") and hooks.has(module, "_recompile_re"):
        module.SKIP_DIRS.append(frames.HERE)
        module._recompile_re()


def patch_saves(module: Any) -> None:
    """Put a record around ``torch.serialization.save``: ``torch.save``, which distributed checkpoints call too."""
    hooks.put(module, "save", _recorded)


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        # What is saved into a buffer may be meant for another rank.
        if not (isinstance(f, (str, os.PathLike)) or hasattr(f, "name")):
            return original(obj, f, *args, **kwargs)
        _begin()
        try:
            result = original(obj, f, *args, **kwargs)
        finally:
            sealed[wall.gi_running][_end,]
        _count()
        return result

    return save


@guarded("save")
def _begin() -> None:
    if here.ring is not None and here.is_rank:
        here.ring.set("save_began_ns", time.monotonic_ns())


@guarded("save")
def _end() -> None:
    if here.ring is not None and here.is_rank:
        here.ring.set("save_ended_ns", time.monotonic_ns())


@guarded("save")
def _count() -> None:
    if here.ring is not None and here.is_rank:
        here.ring.set("saves", here.ring.get("saves") + 1)
        here.ring.set("saved_steps", here.ring.get("steps"))
