"""Starts the recorder in a Python that ``wrap`` has reached: what kind of process is this, and what does it need."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, List

from . import errors, imports, sampler, wire
from .state import AGENT_VARIABLE, MASTER_VARIABLE, describers, guarded, here

_HELPERS = ("multiprocessing.spawn", "multiprocessing.forkserver", "--multiprocessing-fork")


def install() -> None:
    """Install the hooks, once. A rank is recorded from here on; any other Python when it turns out to matter."""
    if getattr(sys, "_ddpdoctor_recorder", None) is not None:
        return
    sys._ddpdoctor_recorder = here  # type: ignore[attr-defined]
    here.on_start += [errors.install, sampler.start]
    _register_patches()
    imports.install()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)
    if is_rank():
        os.environ[MASTER_VARIABLE] = store_address()
        errors.install()
        here.start(wire.ROLE_RANK)
    elif any(mark in argument for argument in _arguments() for mark in _HELPERS):
        here.start(wire.ROLE_CHILD)


def store_address() -> str:
    """Return where the environment says that the job's store is."""
    return "%s:%s" % (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))


def is_rank() -> bool:
    """Return whether torch's elastic agent started this very process as a rank."""
    return "RANK" in os.environ and os.environ.get(AGENT_VARIABLE) == str(os.getppid())


def _arguments() -> List[str]:
    return list(getattr(sys, "orig_argv", None) or getattr(sys, "argv", []))


@guarded("fork")
def _forked() -> None:
    """Give a forked child a ring of its own; the parent's stays the parent's."""
    had_ring = here.ring is not None
    here.ring = None
    sampler.forget_dump()
    if had_ring:
        here.start(wire.ROLE_CHILD)


def _register_patches() -> None:
    def lazily(name: str) -> Callable[[Any], None]:
        def patch(module: Any) -> None:
            from . import training

            if name == "patch_groups":
                from . import calls

                describers["groups"] = calls.groups_now
                describers["flight_recorder"] = training.flight_recorder
            getattr(training, name)(module)

        return patch

    def patch_agent(module: Any) -> None:
        if not is_rank():
            from . import agent

            agent.patch(module)

    imports.patches.update(
        {
            "torch.distributed.distributed_c10d": lazily("patch_groups"),
            "torch.nn.parallel.distributed": lazily("patch_ddp"),
            "torch.autograd": lazily("patch_autograd"),
            "torch.optim.optimizer": lazily("patch_optimizer"),
            "torch.utils.data.dataloader": lazily("patch_loader"),
            "torch.multiprocessing.spawn": lazily("patch_spawn"),
            "multiprocessing.popen_fork": lazily("patch_popen"),
            "torch._dynamo.trace_rules": lazily("patch_dynamo"),
            "torch.distributed.elastic.multiprocessing.api": patch_agent,
            "multiprocessing.process": lambda _: errors.note_processes(),
        }
    )
