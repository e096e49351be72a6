"""How the ranks of a probe work together: they meet, rank 0 collects the results, and all exit with one status.

None of this uses a process group. The group may be what is broken, and the user's code may create its own.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.meeting import meet
from ddpdoctor.exchange.reach import reach
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.words import rank_list

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.launch import Launch

Kind = TypeVar("Kind")

REPORT_LIMIT_S = 120.0
"""Our choice: how long rank 0 may take to judge and draw. The first import of a plotting library takes seconds."""
ABOVE_OURS = 3
"""torch's timeout is this many times ours, so that a probe notices a hang first and says more."""
LEAVE_LIMIT_S = 5.0
"""Our choice: how long rank 0 waits until the others have received the status. Rank 0 may be serving the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Rank 0's last message: the exit status of all ranks."""

    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    """The port of the torch store that rank 0 serves."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrived:
    """A rank has come to a point where ranks wait for each other."""


class Ranks:
    """This rank's link to the other ranks, if any. Every call raises ``StoreError`` if a rank does not answer."""

    def __init__(self, launch: Launch, conversation: Conversation, limit_s: float) -> None:
        """Set who this rank is, and how long it waits for another rank."""
        self.rank, self.world_size = launch.rank, launch.world_size
        self.conversation = conversation
        self._launch, self._limit_s = launch, limit_s

    def gather(self, name: str, record: Kind) -> tuple[Kind, ...] | None:
        """Return the records of all ranks in rank order on rank 0. Return None at once on the others."""
        if self.rank != 0:
            self.conversation.send(f"{name}/{self.rank}", record)
            return None
        others = range(1, self.world_size)
        heard = self.conversation.gather(type(record), name, lambda: others, self._limit_s)
        if missing := [rank for rank in others if rank not in heard]:
            raise StoreError(f"no message came from {rank_list(missing)} within {self._limit_s:g} s")
        return (record, *(heard[rank] for rank in others))

    def agree(self, kind: type[Kind], name: str, decided: Kind | None) -> Kind:
        """Return rank 0's decision on every rank. The other ranks pass None."""
        return self.conversation.agree(kind, name, decided, self._limit_s)

    def wait_for_all(self, name: str) -> None:
        """Return once every rank has called this with the same name, which is used once."""
        everyone = self.gather(name, _Arrived())
        self.agree(_Arrived, f"{name}/all", _Arrived() if everyone else None)

    def end(
        self,
        decide: Callable[[], int],
        limit_s: float = REPORT_LIMIT_S,
        others: Callable[[], int] | None = None,
    ) -> int:
        """Let rank 0 decide the exit status, and return it on every rank.

        All ranks exit together, because torchrun stops the remaining ranks when one fails. The other ranks wait
        ``limit_s`` for rank 0. ``others`` returns how many ranks will receive the status. By default that is all of
        them; it is fewer if some never came.
        """
        if self.world_size == 1:
            return decide()
        if self.rank == 0:
            return self._end_all(decide, others or (lambda: self.world_size - 1))
        word = self.conversation.hear_goodbye(Ended, limit_s, ends_process=True)
        return ExitStatus.INCONCLUSIVE if word is None else word.status

    def _end_all(self, decide: Callable[[], int], others: Callable[[], int]) -> int:
        status: int = ExitStatus.DEFECT
        try:
            status = decide()
        except UserError as error:
            status = error.status
            raise
        finally:
            self.conversation.say_goodbye(Ended(status=int(status)), others, LEAVE_LIMIT_S, ends_process=True)
        return status

    def open_process_group(self, backend: str, device: str, store_limit_s: float, timeout_s: float) -> Any:
        """Create the default process group and return its store, which must live as long. torch's errors propagate."""
        import torch
        from torch import distributed

        gpu = torch.device(device) if device.startswith("cuda") else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        store = self._open_store(store_limit_s)
        distributed.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=gpu,
        )
        return store

    def _open_store(self, limit_s: float) -> Any:
        """Return a torch store that all ranks share."""
        from torch.distributed import HashStore, PrefixStore, TCPStore

        if self.world_size == 1:
            return HashStore()
        timeout = timedelta(seconds=limit_s)
        launch = self._launch
        if launch.launcher is Launcher.TORCHRUN:
            store = TCPStore(launch.hosts[0], launch.port, is_master=False, wait_for_workers=False, timeout=timeout)
            return PrefixStore(f"ddpdoctor/{launch.run}/group/{self.conversation.prefix}", store)
        if self.rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
            self.conversation.send("port", _Port(port=store.port))
            return store
        served = self.conversation.wait(_Port, "port", limit_s, "rank 0")
        if served is None:
            raise StoreError(f"rank 0 opened no store within {limit_s:g} s")
        host = reach(launch.hosts, served.port, limit_s, _address)
        return TCPStore(host, served.port, is_master=False, wait_for_workers=False, timeout=timeout)


def _address(connection: socket.socket) -> str:
    """Return which of rank 0's possible addresses answered."""
    with connection:
        return str(connection.getpeername()[0])


@contextmanager
def meet_ranks(launch: Launch, env: Mapping[str, str], *, meet_limit_s: float, limit_s: float) -> Iterator[Ranks]:
    """Meet the other ranks. Raises ``StoreError`` if they cannot be reached or get lost later."""
    with meet(launch, env, meet_limit_s) as conversation:
        yield Ranks(launch, conversation.begin("probe"), limit_s)


def unreachable(launch: Launch, error: StoreError) -> UserError:
    """Return the error to show when the store cannot be reached or ranks get lost."""
    place = f"{launch.hosts[0]}:{launch.port}"
    if launch.rank == 0:
        advice = "Did a rank fail earlier? Is the command the same on every rank?"
        return UserError(f"the ranks cannot continue at {place}: {error}", help=advice, status=ExitStatus.INCONCLUSIVE)
    return UserError(
        f"rank {launch.rank} cannot continue without rank 0 at {place}: {error}",
        help="Is the command running on rank 0's host? Check MASTER_ADDR, MASTER_PORT and firewalls.",
        status=ExitStatus.INCONCLUSIVE,
    )
