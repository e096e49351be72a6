"""The steps that all nodes do together: serve the store, check it, and try a real start."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from ddpdoctor.diagnose.rendezvous.meeting import PREFIX, in_background
from ddpdoctor.diagnose.rendezvous.messages import Served
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.reaching import Contact, Door, StartTrial
from ddpdoctor.probes.rendezvous.store_probe import knock
from ddpdoctor.probes.rendezvous.torch_process import IMPORT_LIMIT_S, NoTorch, TorchError

if TYPE_CHECKING:
    import threading

    from ddpdoctor.diagnose.rendezvous.meeting import NodeMeeting
    from ddpdoctor.diagnose.rendezvous.messages import Roster
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.launch import NodeLaunch
    from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

SERVED_LIMIT_S = IMPORT_LIMIT_S + 12
TRIAL_LIMIT_S = 20.0
"""Our choice: a healthy start of 64 nodes takes one second on an idle machine."""


class Serving:
    """Serves the store in the background if that is this node's task, and opens the meeting over it."""

    def __init__(self, launch: NodeLaunch, torch: TorchProcess, meeting: NodeMeeting, *, serves: bool) -> None:
        """Start the background thread. If the launcher serves the store itself, it already does."""
        self.served = Served()
        self._launch, self._torch, self._lobby = launch, torch, meeting
        self._serves = serves
        self._thread: threading.Thread = in_background(self._serve)

    def wait(self) -> Served:
        """Wait for the result of serving."""
        self._thread.join()
        return self.served

    def _serve(self) -> None:
        if not self._serves:
            return
        try:
            if not self._launch.launch.agent_store:
                self._torch.serve(self._launch.port)
        except NoTorch as error:
            self.served = Served(without_torch=str(error))
            return
        except TorchError as error:
            self.served = Served(not_served=_plain(str(error)))
            return
        in_background(self._tunnel)

    def _tunnel(self) -> None:
        try:
            self._lobby.serve_over(open_job_store("127.0.0.1", self._launch.port, PREFIX, SERVED_LIMIT_S))
        except StoreError:
            return  # nodes that use ddpdoctor's own port do not need this


def _plain(error: str) -> str:
    """Extract the system's message from "… code: -98, name: EADDRINUSE, message: address already in use"."""
    found = re.search(r"name: (\w+), message: (.+)", error)
    return f"{found[2].rstrip('.')} ({found[1]})" if found is not None else error


def wait_for_store(conversation: Conversation, roster: Roster) -> None:
    """Wait until the nodes that serve the store have said that they do, or why they cannot."""
    deadline = time.monotonic() + SERVED_LIMIT_S
    for arrival in roster.servers:
        conversation.wait(Served, f"served/{arrival}", max(0.0, deadline - time.monotonic()), f"arrival {arrival}")


def look_at_door(launch: NodeLaunch, torch: TorchProcess, *, serves: bool, served: Served, way: str) -> Door:
    """Check the store from this node."""
    return Door(
        host=launch.host,
        port=launch.port,
        serves=serves,
        not_served=served.not_served,
        without_torch=served.without_torch or torch.missing(),
        attempts=knock(launch.host, launch.port, torch),
        way=way,
    )


def stored(door: Door) -> bool:
    """Return whether a node reached this job's store and has torch."""
    return not (door.not_served or door.without_torch) and any(
        one.contact is Contact.CONNECTED for one in door.attempts
    )


def try_start(launch: NodeLaunch, torch: TorchProcess, number: int, nnodes: int) -> StartTrial:
    """Run a real start with one rank per node and return the result."""
    try:
        found = torch.start(
            TRIAL_LIMIT_S, rank=number, world_size=nnodes, host=launch.host, port=launch.port,
            prefix="ddpdoctor/start",
        )  # fmt: skip
    except TorchError as error:
        return StartTrial(node=number, ok=False, stage="store", error=str(error))
    return StartTrial(
        node=number,
        ok=not found["error"],
        stage="" if not found["error"] else str(found["stage"]),
        error=str(found["error"]),
        duration_s=float(found["duration_s"]),
    )
