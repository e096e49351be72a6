"""Connects the ranks of a job: over the launcher's store if it serves one, else over a server that rank 0 runs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ddpdoctor.exchange.client import ServerClient, open_client
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.store import LocalStore
from ddpdoctor.exchange.token import NO_TOKEN, job_token
from ddpdoctor.exchange.torch_store import open_torch_store
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
        if launch.launcher is Launcher.TORCHRUN:
            torch_store = open_torch_store(launch, limit_s)
            opened.callback(torch_store.close)
            yield Conversation(torch_store, token)
        elif launch.rank == 0 and not launch.agent_store:
            server = Server(launch.port, token or NO_TOKEN, one_host=launch.nnodes == 1)
            opened.callback(server.close)
            own = ServerClient(server.admit())
            opened.callback(own.close)
            yield Conversation(own, token, turned_away=lambda: server.strangers)
        else:
            client = open_client(launch.hosts, launch.port, token or NO_TOKEN, limit_s)
            opened.callback(client.close)
            yield Conversation(client, token)
