"""Records the phases of training: making groups, building DDP, forward, backward, steps, batches, epochs, saves."""

from __future__ import annotations

import itertools
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict

from . import calls, detail, fingerprinting, frames, gradients, groups, hooks, loaders, replicas, steps, surroundings
from .errors import noting_errors
from .state import JOINED_VARIABLE, MASTER_VARIABLE, check_every, guarded, here, pass_on, sealed, wall
from .step_clock import clock, enter_phase, leave_phase
from .wrappers import around, hide_own_frames, wraps

# After what ``gradients`` and ``steps`` do then.
replicas.on_gone.append(fingerprinting.model_ended)
here.on_end.append(fingerprinting.group_ends)
_steps = itertools.count(1)
# Optimizers that step as a part of another optimizer; their steps are not counted.
_inner: weakref.WeakSet[Any] = weakref.WeakSet()
_batches = itertools.count(1)
_epochs = itertools.count(1)


def count(cell: str, counter: Any) -> None:
    if here.ring is not None:
        here.ring.set(cell, next(counter))


def phase(op: str, *, waits: bool = False, before: Any = None, after: Any = None) -> Any:
    """Return a decorator that puts a record around a function.

    ``before`` may return another operation, and the process group in which DDP's C++ makes collectives meanwhile, or
    None if it makes none.
    """
    note_end = guarded(op)(after) if after is not None else None

    def decorate(original: Any) -> Any:
        @wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            index = 0
            try:
                name, group = (before(*args, **kwargs) if before is not None else None) or (op, None)
                ring = here.ring
                _, known, begun = groups.look_up(group)
                is_named = group is not None and known is not None and ring is not None
                index = calls.begin(name, groups.name_id(ring, known) if is_named else 0, begun)
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
    def before_destroy(group: Any = None) -> None:
        is_default = group is None or group is groups.default()
        if is_default:
            groups.note_device_times()
        fingerprinting.group_ends(group)
        loaders.settle_all()
        gradients.settle_all()
        steps.settle_all()
        detail.forget_helpers(group)
        if here.is_rank and is_default:
            os.environ.pop(JOINED_VARIABLE, None)
            here.note("destroyed")

    here.queries.update(groups=calls.groups_now, flight_recorder=groups.flight_entries_now)
    detail.make_safe(module)
    calls.patch(module)
    init = phase("init_process_group", waits=True, before=before_init, after=after_init)
    hooks.put(module, "init_process_group", init)
    hooks.put(module, "new_group", phase("new_group", waits=True))
    hooks.put(module, "destroy_process_group", phase("destroy_process_group", before=before_destroy))
    # A hook that waits for a module that this torch does not have would otherwise wait unnoticed.
    root = os.path.dirname(str(sys.modules["torch"].__file__))
    for name in hooks.patches if os.path.isdir(root) else ():  # else torch comes from an archive
        path = os.path.join(root, *name.split(".")[1:])
        if name.startswith("torch.") and not os.path.exists(path + ".py") and not os.path.isdir(path):
            hooks.note(name, found=False)
    # What the evidence about groups is read from.
    world = hooks.part(module, "_world")
    hooks.has(type(world), "default_pg", "pg_group_ranks", "pg_map", "pg_names")
    hooks.has(module.ProcessGroup, "_get_sequence_number_for_group", "_get_backend", "_device_types")
    native = sys.modules["torch._C._distributed_c10d"]
    hooks.note("flight recorder", any(hasattr(native, name) for name in groups.FLIGHT_RECORDERS))


def before_init(*args: Any, **kwargs: Any) -> None:
    names = ("backend", "init_method", "timeout", "world_size", "rank")
    given = {**dict(zip(names, args)), **kwargs}
    address = here.store_address()
    init_method = given.get("init_method")
    if isinstance(init_method, str) and init_method.startswith("tcp://"):
        address = init_method[len("tcp://") :].partition("?")[0].rstrip("/")
    launched = os.environ.get(MASTER_VARIABLE, address)
    is_own = launched.replace("localhost", "127.0.0.1") == address.replace("localhost", "127.0.0.1")
    if not here.is_rank and not is_own:
        # A script starts its own ranks at its own address, and one of them is to create a store there. They inherit
        # from the agent's rank that the agent has the store, and would wait forever for one that nobody creates.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if not here.is_below_trainer():
        here.promote()
    groups.turn_on_flight_recorders()
    if here.ring is None:
        return
    place: Dict[str, Any] = {}
    for name in ("world_size", "rank"):
        text, value = os.environ.get(name.upper(), ""), given.get(name)
        place[name] = value if isinstance(value, int) and value >= 0 else int(text) if text.isdigit() else None
    # The script's, else torch's own for the backend.
    of_nccl = getattr(groups.c10d, "default_pg_nccl_timeout", None) if given.get("backend") == "nccl" else None
    timeout = given.get("timeout") or of_nccl or getattr(groups.c10d, "default_pg_timeout", None)
    seconds = getattr(timeout, "total_seconds", None)
    timeout_s = float(seconds()) if seconds is not None else None
    meeting: Any = None  # the file in which ranks meet, before this one opens it
    if isinstance(init_method, str) and init_method.startswith("file://"):
        meeting = {"path": init_method[len("file://") :].partition("?")[0], "size_bytes": 0}
        try:
            meeting["size_bytes"] = os.stat(meeting["path"]).st_size
        except OSError as error:
            pass_on(error)
    here.note("init", **place, meeting=meeting, timeout_s=timeout_s)


def after_init(*args: Any, **kwargs: Any) -> None:
    if here.ring is None:
        return
    rank, world_size = groups.c10d.get_rank(), groups.c10d.get_world_size()
    backend, level = groups.backends_of(groups.default()), groups.c10d.get_debug_level().name
    here.note("initialized", rank=rank, world_size=world_size, backend=backend, debug_level=level)
    here.ring.set("initialized", 1)
    if here.is_rank:
        os.environ[JOINED_VARIABLE] = str(os.getpid())


def patch_ddp(module: Any) -> None:
    ddp = module.DistributedDataParallel
    code = ddp.__init__.__code__
    given = calls.Hook("ddp_init", code.co_varnames[: code.co_argcount], None).argument

    def before(*args: Any, **kwargs: Any) -> Any:
        mesh = given("device_mesh", args, kwargs)
        own = mesh.get_group(mesh_dim=0) if mesh is not None else given("process_group", args, kwargs)
        group = detail.constructing.group = own if own is not None else groups.default()
        syncs_buffers = given("broadcast_buffers", args, kwargs) is not False
        finds_unused = bool(given("find_unused_parameters", args, kwargs))
        replicas.note_model(given("module", args, kwargs), group, syncs_buffers, finds_unused)
        return "ddp_init", group

    def after(model: Any, /, *unused: Any, **also_unused: Any) -> None:
        detail.constructing.group = None
        steps.keep_names(model)
        replicas.register(model)

    def buffers_synced(ddp: Any) -> None:
        began_ns = time.monotonic_ns()
        fingerprinting.buffers_synced(ddp)
        clock.leave_out(began_ns)

    def before_forward(ddp: Any, /, *args: Any, **kwargs: Any) -> Any:
        import torch

        began_ns = time.monotonic_ns()
        fingerprinting.forward_begins(ddp)
        loaders.forward_begins(ddp, args, kwargs)
        clock.leave_out(began_ns)
        if ddp.training and ddp.require_backward_grad_sync:
            steps.will_reduce(ddp)
        return "ddp_forward" if torch.is_grad_enabled() and ddp.training else "ddp_forward_no_grad", ddp.process_group

    steps.patch_ddp(ddp)
    surroundings.watch_collections()
    gradients.patch_ddp(ddp)
    hooks.put(ddp, "__init__", phase("ddp_init", waits=True, before=before, after=after))
    hooks.put(ddp, "forward", phase("ddp_forward", before=before_forward))
    hooks.put(ddp, "_post_forward", around(after=replicas.forward_ended))
    hooks.put(ddp, "_sync_buffers", around(after=buffers_synced))
    # What is called on DDP's reducer and timers, which are C++.
    native = sys.modules["torch._C._distributed_c10d"]
    hooks.has(native.Reducer, "_check_reducer_finalized", "get_backward_stats", "_ddp_graph_static")
    hooks.has(native.Logger, "_get_ddp_logging_data", "set_runtime_stats_and_log")


def patch_autograd(module: Any) -> None:
    def before(*unused: Any, **also_unused: Any) -> Any:
        replicas.backward_begins()
        loaders.backward_begins()
        ddp = steps.model_to_reduce()
        return "backward", ddp.process_group if ddp is not None else None

    hooks.put(module, "backward", steps.measured_backward)
    if check_every():
        hooks.put(module, "backward", gradients.tracking)
    hooks.put(module, "backward", phase("backward", waits=True, before=before, after=replicas.backward_ended))


def patch_optimizer(module: Any) -> None:
    @guarded("optimizer step")
    def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
        inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer steps through an inner optimizer
        if isinstance(inner, module.Optimizer):
            _inner.add(inner)
        began_ns = time.monotonic_ns()
        fingerprinting.before_step(optimizer, args, kwargs)
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
        fingerprinting.after_step(optimizer)
        clock.leave_out(began_ns)

    if check_every():
        hooks.put(module.Optimizer, "__init__", around(after=fingerprinting.made))
    if hooks.has(module, "register_optimizer_step_pre_hook"):
        module.register_optimizer_step_pre_hook(begins)
    if hooks.has(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(stepped)


def patch_loader(module: Any) -> None:
    loaders.patch(module)
    hooks.put(hooks.part(module, "_BaseDataLoaderIter"), "__next__", _next_batch)
    hooks.put(module.DataLoader, "__iter__", phase("epoch", after=lambda *a: count("epochs", _epochs)))
    hooks.has(sys.modules.get(loaders.FETCH_MODULE), *loaders.FETCHERS)  # its workers will time them


def _next_batch(original: Callable[..., Any]) -> Callable[..., Any]:
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
                workers = getattr(self, "_num_workers", None)
                if workers is not None and workers != clock.workers and sys.modules["torch"].is_grad_enabled():
                    clock.workers = workers
                    ring.set("loader_workers", workers + 1)  # 0 means that it is not known
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

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def _wrap(function: Any, *args: Any, **kwargs: Any) -> Any:
            return original(noting_errors(function), *args, **kwargs)

        return _wrap

    hooks.put(module, "_wrap", noting)


def patch_dynamo(module: Any) -> None:
    """Make torch.compile skip the recorder's frames, as it skips torch's own."""
    if hooks.has(module, "SKIP_DIRS", "_recompile_re"):
        module.SKIP_DIRS.append(frames.HERE)
        module._recompile_re()


def patch_saves(module: Any) -> None:
    """Put a record around ``torch.serialization.save``: ``torch.save``, which distributed checkpoints call too."""

    def is_file(f: Any) -> bool:  # what is saved into a buffer may be meant for another rank
        return isinstance(f, (str, os.PathLike)) or hasattr(f, "name")

    @guarded("save")
    def note(moment: str) -> None:
        if here.ring is not None and here.is_rank:
            here.ring.set(moment, time.monotonic_ns())

    def begins(obj: Any, f: Any, *unused: Any, **also_unused: Any) -> Any:
        if not is_file(f):
            return None
        note("save_began_ns")
        return "save_ended_ns"

    @guarded("save")
    def saved(result: Any, obj: Any, f: Any, *unused: Any, **also_unused: Any) -> None:
        if is_file(f) and here.ring is not None and here.is_rank:
            here.ring.set("saves", here.ring.get("saves") + 1)
            here.ring.set("saved_steps", here.ring.get("steps"))

    hooks.put(module, "save", around(before=begins, last=note, then=saved))
