"""Records what a rank's speed depends on apart from its steps, and where the script logs.

The sampling thread cannot see the line of a garbage collection, which keeps the GIL until it is over. What Python calls
at its start and end is pure C code: from a Python function, an error of a signal handler would only be printed.
"""

from __future__ import annotations

import _thread
import gc
import os
import sys
import time
import weakref
from collections import Counter, deque
from functools import partial
from itertools import accumulate, chain, repeat, tee
from operator import attrgetter, getitem, sub
from typing import Any, Deque, Dict, Iterator, List, Optional, Set, Tuple

from . import frames, hooks
from .state import guarded, here
from .step_clock import clock
from .wrappers import around

# The step after which threads and frameworks are noted. Our choice: a script has set its threads by then.
NOTED_AT_STEP = 5
MAX_DATA_PARALLEL = 8
# By framework: the modules of which one is loaded where a script trains with it.
FRAMEWORKS = {
    "lightning": ("lightning.pytorch.trainer", "pytorch_lightning.trainer"),
    "transformers": ("transformers.trainer",),
    "accelerate": ("accelerate.accelerator",),
}
_built_at: Any = weakref.WeakKeyDictionary()  # by DataParallel that has not trained yet: the line that built it


def patch_data_parallel(module: Any) -> None:
    @guarded("data parallel")
    def built(model: Any) -> None:
        if here.ring is not None and len(_built_at) < MAX_DATA_PARALLEL:
            _built_at[model] = frames.describe_user(sys._getframe())

    @guarded("data parallel")
    def used(model: Any, /, *unused: Any, **also_unused: Any) -> None:
        """Note a model that trains, once. One that was only built to load a checkpoint does not count."""
        frame = _built_at.get(model)
        if frame is not None and model.training and sys.modules["torch"].is_grad_enabled() and here.ring is not None:
            del _built_at[model]
            here.note("data_parallel", devices=len(getattr(model, "device_ids", ()) or ()), frame=frame)

    owner = hooks.part(module, "DataParallel")
    hooks.put(owner, "__init__", around(after=built))
    hooks.put(owner, "forward", around(before=used))


@guarded("surroundings")
def note_surroundings() -> None:
    loaded = [name for name, modules in FRAMEWORKS.items() if any(module in sys.modules for module in modules)]
    threads, cores = sys.modules["torch"].get_num_threads(), len(os.sched_getaffinity(0))
    here.note("surroundings", threads=threads, cores=cores, frameworks=loaded)


LONG_NS = 1_000_000  # Lines of shorter collections are not counted. Our choice: those of young objects take far less.
MAX_LINES = 64
MAX_COLLECTIONS = 4096  # collections of one step that are counted, the latest
MAX_FRAMES = 1024  # frames of its long collections that are kept, the latest
# The step after which the line is noted first. It is noted again after four times as many, and at the end.
FIRST_NOTE = 8
_began: Deque[int] = deque([0], 1)  # when the last collection began
# Thread and nanoseconds of each collection since the last step.
_took: Deque[Tuple[int, int]] = deque(maxlen=MAX_COLLECTIONS)
# Of each long one: the same, then code and line of each frame, innermost first.
_places: Deque[Tuple[Any, int]] = deque(maxlen=MAX_FRAMES)
# By the user's line (file, number, function): the nanoseconds of its long collections.
_lines: Dict[Tuple[str, int, str], int] = {}
_due = FIRST_NOTE
_callback: Any = None


def watch_collections() -> None:
    global _callback
    if _callback is not None:
        if _callback not in gc.callbacks:
            gc.callbacks.append(_callback)
        return
    now, last = partial(iter, time.monotonic_ns), partial(map, getitem)
    thread: Iterator[int] = iter(_thread.get_ident, None)
    to_keep, to_judge = tee(map(sub, now(None), last(repeat(_began), repeat(-1))))
    # accumulate makes "f_back", "f_back", ... into a walk outward. It ends with an AttributeError at the None after the
    # outermost frame. To getattr with a default, that is a missing attribute.
    frame: Any = zip(map(dict.get, iter(sys._current_frames, None), iter(_thread.get_ident, None)))
    walks: Any = map(accumulate, map(chain, frame, repeat(("f_back",) * frames.MAX_DEPTH)), repeat(getattr))
    rows: Any = map(map, repeat(attrgetter("f_code", "f_lineno")), walks)
    keep_long = zip(map(_places.append, last(repeat(_took), repeat(-1))), map(_places.extend, rows))
    by_length: Any = (repeat(None), keep_long)
    keep_if_long = map(next, map(by_length.__getitem__, map(LONG_NS.__le__, to_judge)))

    class Marks:
        start = property(partial(next, map(_began.append, now(None))))
        stop = property(partial(next, zip(map(_took.append, zip(thread, to_keep)), keep_if_long)))

    _callback = partial(getattr, Marks())  # It takes a phase ("start" or "stop") and any second argument.
    clock.collected = _count
    gc.callbacks.append(_callback)


def _count() -> int:
    """Return the time of the main thread's collections since the last call, and count the long ones' user lines."""
    total = 0
    while _took:
        thread, took_ns = _took.popleft()
        total += took_ns if thread == here.main_thread else 0
    took_ns = 0
    while _places:
        place, number = _places.popleft()
        if isinstance(place, int):
            took_ns = number if place == here.main_thread and clock.number > 1 else 0
        elif took_ns and frames.is_user_file(place.co_filename):
            line = (place.co_filename, number or 0, place.co_name)
            if line in _lines or len(_lines) < MAX_LINES:
                _lines[line] = _lines.get(line, 0) + took_ns
            took_ns = 0
    return total


def step_ended(number: int) -> None:
    global _due
    if number >= _due:
        _due *= 4
        note_line()


@guarded("collections")
def note_line() -> None:
    if _lines:
        here.note("collected", frame=frames.describe(*max(_lines, key=lambda line: _lines[line])))


WATCHED_AFTER = 3  # The step after this many steps is looked at. Our choice: one in which training is under way.
REDUCTIONS = frozenset({"all_reduce", "reduce"})
MAX_CALLS = 4096
MIN_GRADIENTS = 2
_reduced: List[Tuple[int, Any]] = []  # the address and the shape of each tensor that all_reduce was given in the step
_reduced_at: Optional[Any] = None


def hand_made_reduction(tensor: Any, frame: Any) -> None:
    global _reduced_at
    if len(_reduced) < MAX_CALLS and hasattr(tensor, "data_ptr"):
        _reduced.append((tensor.data_ptr(), tensor.shape))
        _reduced_at = frames.describe_user(frame) if _reduced_at is None else _reduced_at


@guarded("hand-made reduction")
def hand_made_step(optimizer: Any) -> None:
    """Compare what was reduced in this step with the gradients of an optimizer that is about to step."""
    global _reduced_at
    if not _reduced or here.ring is None:
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    found = len({p.grad.data_ptr() for p in trained}.intersection(address for address, _ in _reduced))
    copies = 0
    if found < MIN_GRADIENTS and not clock.step.reductions:
        # Parameters have these shapes too. A script that averages them reduces no gradients.
        weights = {p.data_ptr() for p in trained}
        shapes = Counter(shape for address, shape in _reduced if address not in weights)
        copies = 0 if Counter(p.grad.shape for p in trained) - shapes else len(trained)
    if max(found, copies) >= MIN_GRADIENTS:
        here.note("hand_reduced", gradients=max(found, copies), copied=copies > 0, frame=_reduced_at)
    _reduced.clear()
    _reduced_at = None


# The loggers that were noted, at their first use: TensorBoard's ``add_hparams`` makes a writer for each call.
_noted: Set[str] = set()
# By module: the logger, its class, if it is a method, and the function that begins a run.
_LOGGERS = {
    "torch.utils.tensorboard.writer": ("tensorboard", "SummaryWriter", "__init__"),
    "wandb": ("wandb", "", "init"),
    "mlflow.tracking.client": ("mlflow", "MlflowClient", "create_run"),  # which frameworks use
    "mlflow.tracking.fluent": ("mlflow", "", "start_run"),
}


def patch_logger(module: Any) -> None:
    logger, name, function = _LOGGERS[module.__name__]
    owner = getattr(module, name, None) if name else module
    hooks.put(owner, function, around(then=guarded(logger)(partial(_note_logger, logger))), is_api=True)


def _note_logger(logger: str, run: Any, *args: Any, **kwargs: Any) -> None:
    """Note a run. The first argument is the writer of TensorBoard, or the client of MLflow, if there is one."""
    if logger == "tensorboard":
        place = {"folder": os.path.abspath(os.fspath(args[0].log_dir))}
    elif logger == "mlflow":
        uri = str(getattr(args[0] if args else None, "tracking_uri", None) or sys.modules["mlflow"].get_tracking_uri())
        # An address with a password is left out, so that it is stored nowhere.
        place = {"id": run.info.run_id, "tracking_uri": "" if "@" in uri else uri, "folder": os.getcwd()}
    else:
        from .storage.secrets import hide_in_text

        settings = run.settings
        if settings.mode == "disabled":
            return
        place = {
            "id": run.id, "project": run.project, "entity": run.entity or "",
            "folder": os.path.abspath(settings.root_dir), "mode": "offline" if run.offline else "online",
            "base_url": hide_in_text(str(settings.base_url)),
        }  # fmt: skip
    if here.ring is not None and here.is_rank and logger not in _noted:
        _noted.add(logger)
        here.note("logger", logger=logger, place=place)
