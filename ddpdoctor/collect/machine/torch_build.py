"""Reads facts about torch from a child process that imports it, so that a crash or hang does no harm."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.child import start_torch_child
from ddpdoctor.collect.recorded import read_record
from ddpdoctor.model.facts import signal_name
from ddpdoctor.model.reading import NotRead, Unread, Why
from ddpdoctor.model.software import TorchBuild

if TYPE_CHECKING:
    from ddpdoctor.collect.child import ChildProcess
    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

MARK = "ddpdoctor-torch-facts:"
"""The same as in ``probes.torch_facts``, which collectors do not import because it loads torch."""
CHILD_LIMIT_S = 55.0
"""Our choice: enough for a cold import from a network file system on a busy cluster, and for CUDA without a persistence
daemon, which takes a few seconds for each GPU. It is below the section's limit, so that facts from before a hang are
not lost."""


def read_torch(system: System, plan: ReadingPlan) -> TorchBuild:
    """Return the child's facts; raises ``NotRead`` if torch must not be imported or the import did not end."""
    if not plan.use_torch:
        raise NotRead(Unread(why=Why.NOT_ASKED, reason="torch is not imported (--no-torch)"))
    if not system.live:
        raise NotRead(Unread(why=Why.ABSENT, reason="a recorded machine cannot import torch"))
    child = plan.torch_child if plan.torch_child is not None else start_torch_child(system.env)
    return wait_for_torch(child, CHILD_LIMIT_S)


def wait_for_torch(child: ChildProcess, limit_s: float) -> TorchBuild:
    """Wait for a started child, and turn its output into facts."""
    ended = child.wait(limit_s)
    out, err, status = ended.out, ended.err, ended.status
    said = [json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK)]
    if not said and status is None:
        raise NotRead(Unread(why=Why.TIMEOUT, reason=f"`import torch` took longer than {limit_s:.0f} s"))
    if not said:
        return read_record(TorchBuild, {"import_error": _how_it_ended(status, err)})
    facts: dict[str, Any] = {key: value for part in said for key, value in part.items()}
    if len(said) == 1 and "import_error" not in facts:
        facts |= {"cuda_error": _how_cuda_ended(status, limit_s), "cuda_stuck": True}
    return read_record(TorchBuild, facts)


def _how_it_ended(status: int | None, err: str) -> str:
    """Describe how an interpreter died that printed no facts."""
    if status is not None and status < 0:
        hint = ": the wheel is built for another processor" if -status == signal.SIGILL else ""
        return f"the interpreter was killed by {signal_name(-status)} while it imported torch{hint}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    return f"the interpreter ended with status {status} while it imported torch{last}"


def _how_cuda_ended(status: int | None, limit_s: float) -> str:
    if status is None:
        return f"CUDA was not initialized within {limit_s:.0f} s"
    if status < 0:
        return f"the process was killed by {signal_name(-status)} while it initialized CUDA"
    return f"the process ended with status {status} while it initialized CUDA"
