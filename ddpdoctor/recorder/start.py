"""Starts the recorder in each Python of a wrapped job: decides what kind of process it is, and what it needs.

Most Pythons of a job never become a rank: until one does, only this module and ``hooks`` are loaded. Under
``ddpdoctor.watch`` torch is there, and modules have own names for what is replaced (``from ... import all_reduce``).
"""

from __future__ import annotations

import _thread
import os
import sys

from . import hooks
from .settings import read_settings
from .state import AGENT_VARIABLE, MASTER_VARIABLE, RANK_PID_VARIABLE, guarded, here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, List

GIVEN_VARIABLE = "DDPDOCTOR_GIVEN"  # the number of the rank that this process is, or that started it
WATCHER_VARIABLE = "DDPDOCTOR_WATCHER"  # the pid of ``wrap``
# How torch's launchers, Open MPI, PMIx, MPICH and Slurm tell a process its number.
NUMBER_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "ddpdoctor"})
_LAUNCHER_MODULES = (
    "-m torch.distributed.run", "-m torch.distributed.launch", "-m accelerate", "-m deepspeed", "-m ddpdoctor",
)  # fmt: skip
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X"})
_HELPERS = ("multiprocessing.spawn", "multiprocessing.forkserver", "--multiprocessing-fork")


def install() -> None:
    """Install the hooks, once. A rank is recorded from now on; any other Python once it becomes relevant."""
    if getattr(sys, "_ddpdoctor_recorder", None) is not None:
        return
    hook_in()
    if is_rank():
        start_rank()
        return
    is_helper = any(mark in argument for argument in _arguments() for mark in _HELPERS)
    if not is_helper and RANK_PID_VARIABLE in os.environ and _program().endswith(".py"):
        # A rank may wait for what it started to run a script of the user's (an evaluation, a server, the training), so
        # its lines and its errors count. Tools (compilers, installed programs) get no recorder.
        from . import frames

        is_helper = frames.is_user_file(os.path.abspath(_program()))
    if is_helper:
        start_helper()


def hook_in() -> None:
    """Put the hooks in, now or when their modules are imported. Nothing is recorded before a ring is made."""
    sys._ddpdoctor_recorder = here  # type: ignore[attr-defined]

    def start_parts() -> None:
        from . import errors, sampler

        errors.install()
        sampler.start()
        if here.is_rank and not os.environ.get(AGENT_VARIABLE):
            sampler.register_sigterm()

    here.on_start.append(start_parts)
    _register_patches()
    sys.meta_path.insert(0, hooks.PatchingFinder)
    for name, patch in list(hooks.patches.items()):
        hooks.when_there(name, patch)

    @guarded("fork")
    def forked() -> None:
        """Give a forked child its own ring; only the parent writes to the parent's ring."""
        former, here.main_thread = here.put_aside(), _thread.get_ident()  # this thread is the one that forked
        if former is not None:
            from . import sampler

            sampler.forget()
            start_helper()

    os.register_at_fork(after_in_child=forked)


def start_rank() -> None:
    os.environ[RANK_PID_VARIABLE] = str(os.getpid())
    os.environ[GIVEN_VARIABLE] = given_number()
    os.environ[MASTER_VARIABLE] = here.store_address()
    here.start(is_rank=True)


def start_helper() -> None:
    here.start(is_rank=False)
    # It may be a loader's worker: the batches that it makes are timed.
    hooks.when_there("torch.utils.data._utils.fetch", _later("loaders.patch_fetchers"))


def is_rank() -> bool:
    """Return whether this very process was started as a rank."""
    # A rank is the first Python with a number that a launcher gave it. Its children inherit the number but are not
    # ranks. If no launcher gave a number, the rank is the command that ``wrap`` was given, provided it runs a script.
    if os.environ.get(RANK_PID_VARIABLE) == str(os.getpid()):
        return True
    given = os.environ.get(GIVEN_VARIABLE, "")
    agent = os.environ.get(AGENT_VARIABLE)
    if agent:
        return "RANK" in os.environ and not given.startswith(agent + " ")
    if _runs_launcher():
        return False
    number = given_number()
    if number:
        return number != given
    runs_script = _program().endswith(".py") or _program().startswith("-m ")
    return os.environ.get(WATCHER_VARIABLE) == str(os.getppid()) and runs_script


def given_number() -> str:
    """Return the numbers that launchers gave this process, as one text; empty if no launcher gave any."""
    if not any(name in os.environ for name in NUMBER_VARIABLES):
        return ""
    names = (AGENT_VARIABLE, "LOCAL_RANK", "WORLD_SIZE", *NUMBER_VARIABLES)
    return " ".join(os.environ.get(name, "-") for name in names)


def _program() -> str:
    """Return the script that this Python runs, or ``-m`` and its module; empty if that is not known yet."""
    words = iter(_arguments()[1:])
    for word in words:
        if word == "-m":
            return "-m " + next(words, "")
        if word in _OPTIONS_WITH_VALUE:
            next(words, "")
        elif not word.startswith("-"):
            return word
        elif word.startswith("-c"):
            break
    return ""


def _runs_launcher() -> bool:
    program = _program()
    return program.startswith(_LAUNCHER_MODULES) or os.path.basename(program) in _LAUNCHERS


def _arguments() -> List[str]:
    return list(getattr(sys, "orig_argv", None) or getattr(sys, "argv", []))


def _register_patches() -> None:
    hooks.patches["torch.distributed.elastic.multiprocessing.api"] = _by_agent("agent.patch", "agent.patch_inner")
    hooks.patches["torch.distributed.elastic.agent.server.api"] = _by_agent("agent.patch_meetings")
    if _runs_launcher():  # it imports all of torch and trains nothing: hooks would only delay the ranks
        return
    settings = read_settings(os.environ)

    loggers = ("torch.utils.tensorboard.writer", "wandb", "mlflow.tracking.client", "mlflow.tracking.fluent")
    functions = {
        "torch.nn.parallel.distributed": "training.patch_ddp",
        "torch.autograd": "training.patch_autograd",
        "torch.optim.optimizer": "training.patch_optimizer",
        "torch.utils.data.dataloader": "training.patch_loader",
        "torch.multiprocessing.spawn": "training.patch_spawn",
        "multiprocessing.popen_fork": "errors.patch_popen",
        "torch._dynamo.trace_rules": "training.patch_dynamo",
        "signal": "wrappers.patch_signal",
        "torch.serialization": "training.patch_saves",
        **dict.fromkeys(loggers if settings.log_findings else (), "surroundings.patch_logger"),
        # detail first: all ranks must decide the same, even if a later hook fails on one of them
        "torch.distributed.distributed_c10d": "detail.patch_init training.patch_groups",
        "torch.distributed": "detail.turn_on",
        "torch.distributed._functional_collectives": "functional.patch",
        "torch.nn.parallel.data_parallel": "surroundings.patch_data_parallel",
        "torch.cuda.graphs": "step_clock.patch_graphs",
        "torch.utils.data.distributed": "data.patch",
        "torch.distributed.fsdp._fully_shard._fully_shard": "mesh.patch",
        "torch.distributed.fsdp.fully_sharded_data_parallel": "mesh.patch",
        "torch.distributed.tensor.parallel.api": "mesh.patch",
        "torch.distributed.tensor._api": "mesh.patch",
        "multiprocessing.process": "errors.note_processes",
        "asyncio.base_events": "waits.patch_loop",
        "concurrent.futures._base": "waits.patch_futures",
        "multiprocessing.pool": "waits.patch_pool",
    }
    if settings.tune_rounds:  # after those of training, so that they run first
        functions["torch.nn.parallel.distributed"] += " tune_trial.patch_ddp"
        functions["torch.optim.optimizer"] += " tune_trial.patch_optimizer"
        functions["torch.utils.data.dataloader"] += " tune_trial.patch_loader"
        functions["torch.serialization"] = "tune_trial.patch_saves"
    hooks.patches.update({module: _later(names) for module, names in functions.items()})
    asked = {"helpers": "waits.lost", "lock": "waits.lock", "store": "waits.store", "handled": "errors.handled_now"}
    here.describers.update({key: _later(name) for key, name in asked.items()})


def _later(names: str) -> Callable[..., Any]:
    """Return a function that calls functions of other modules of the recorder. They are loaded when it is called."""

    def call(*args: Any) -> Any:
        from importlib import import_module

        result = None
        for name in names.split():
            part, _, function = name.partition(".")
            result = getattr(import_module("." + part, __package__), function)(*args)
        return result

    return call


def _by_agent(name: str, inner: str = "") -> Callable[[Any], None]:
    """Return a patch of ``agent`` for a process that may be the job's agent, and another for one inside of a rank."""

    def patch(module: Any) -> None:
        _later(inner if os.environ.get(AGENT_VARIABLE) or here.is_below_trainer() else name)(module)

    return patch


_PACKAGE = __package__ or ""


def is_foreign() -> bool:
    """Return whether Python loaded a recorder at its start, because this process belongs to a job that is watched."""
    return getattr(sys, "_ddpdoctor_recorder", here) is not here


def begin_late(folder: str) -> None:
    """Record this process in a run folder from now on. A former folder keeps what it has."""
    if here.ring is not None and here.folder == folder:
        return
    here.put_aside()
    here.folder = folder
    if hasattr(sys, "_ddpdoctor_recorder"):
        here.start(is_rank=here.is_rank)
    else:
        hook_in()
        (start_rank if is_rank() else start_helper)()
        _replace_copies()
    try:  # note a default group that was made before the hooks went in, as if it were made now
        training = sys.modules.get(_PACKAGE + ".training")
        if training is not None and training.groups.default() is not None:
            c10d = training.groups.c10d
            training.before_init(world_size=c10d.get_world_size(), rank=c10d.get_rank())
            training.after_init()
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("running group", error)


@guarded("copies")
def _replace_copies() -> None:
    wrapper_of = {id(original): wrapper for original, wrapper in hooks.replaced}

    def outermost(function: Any) -> Any:
        while id(function) in wrapper_of:
            function = wrapper_of[id(function)]
        return function

    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not module_name.startswith(_PACKAGE) and type(names) is dict:
            for name, value in list(names.items()):
                if id(value) in wrapper_of:
                    names[name] = outermost(value)
    functional = sys.modules.get("torch.distributed._functional_collectives")
    # torch.compile knows the functions that it can trace by this table.
    traced = getattr(functional, "traceable_collective_remaps", {})
    traced.update({outermost(module): traced[module] for module in list(traced) if id(module) in wrapper_of})
