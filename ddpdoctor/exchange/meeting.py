"""Connects the ranks of a job: over the launcher's store if it serves one, else over a server that rank 0 runs.

With both of torchrun's rendezvous, static and c10d, the agent of node 0 serves a store at MASTER_ADDR:MASTER_PORT for
as long as that agent lives. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 must serve it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.client import ServerClient, open_client
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.store import LocalStore, StoreError
from ddpdoctor.exchange.token import NO_TOKEN, job_token
from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpdoctor.model.launch import Launch


@contextmanager
def meet(launch: Launch, env: Mapping[str, str], limit_s: float) -> Iterator[Conversation]:
    """Yield the conversation of a job's ranks. Rank 0 serves it if needed; a single rank uses a local store.

    Raises ``StoreError`` with what was tried and seen if rank 0 cannot be reached or cannot listen on its port.
    """
    token = job_token(launch, env)
    if not launch.gathers:
        yield Conversation(LocalStore(), token)
        return
    with ExitStack() as opened:
        serves = launch.rank == 0 and not launch.agent_store
        if launch.launcher is Launcher.TORCHRUN:
            # The C++ log of torch, if it is loaded after this, calls it an error that a peer leaves.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            torchs = _serve_torch_store(launch, limit_s) if serves else None
            store = open_job_store(launch.hosts[0], launch.port, f"ddpdoctor/{launch.run}/", limit_s)
            yield Conversation(opened.enter_context(closing(store)), token)
            del torchs  # it serves as long as it is referred to
        elif serves:
            server = opened.enter_context(closing(Server(launch.port, token or NO_TOKEN, one_host=launch.nnodes == 1)))
            own = opened.enter_context(closing(ServerClient(server.admit())))
            yield Conversation(own, token, turned_away=lambda: server.strangers)
        else:
            client = open_client(launch.hosts, launch.port, token or NO_TOKEN, limit_s)
            yield Conversation(opened.enter_context(closing(client)), token)


def _serve_torch_store(launch: Launch, limit_s: float) -> Any:
    """Serve the store that init_process_group will use in this process too."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(
            launch.hosts[0], launch.port, is_master=True, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=limit_s),
        )  # fmt: skip
    except RuntimeError as error:
        raise StoreError(f"cannot listen on port {launch.port}: {str(error).partition(chr(10))[0]}") from error
