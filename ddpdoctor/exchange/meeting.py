"""Where the processes of a job meet: the launcher's store or hub where it serves one, else a hub of rank 0's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.exchange.framing import pack, unpack
from ddpdoctor.exchange.hub import Hub
from ddpdoctor.exchange.hub_store import open_hub_store
from ddpdoctor.exchange.token import job_token
from ddpdoctor.exchange.torch_store import open_torch_store
from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

    from ddpdoctor.exchange.store import Store
    from ddpdoctor.model.launch import Launch

NO_TOKEN = b"ddpdoctor"
"""What a hub and its clients prove to hold where the job has no secret: that they are ddpdoctor."""


class Meeting:
    """A context: rank 0 serves the hub inside of it, where one is needed."""

    def __init__(self, launch: Launch, env: Mapping[str, str]) -> None:
        """Take who this process is, and the environment for the token."""
        self._launch = launch
        self._token = job_token(launch, env)
        self._hub: Hub | None = None

    def __enter__(self) -> Self:
        """Serve, on rank 0; raises ``StoreError`` where the port cannot be had."""
        if self._launch.launcher is not Launcher.TORCHRUN and self._launch.rank == 0 and not self._launch.agent_store:
            self._hub = Hub(self._launch.port, self._token or NO_TOKEN, one_host=self._launch.nnodes == 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        if self._hub is not None:
            self._hub.close()

    @property
    def strangers(self) -> int:
        """How many connections were turned away for want of the token."""
        return 0 if self._hub is None else self._hub.strangers

    def open(self, limit_s: float) -> Store:
        """Return a connection; raises ``StoreError`` with what was tried and seen."""
        if self._launch.launcher is Launcher.TORCHRUN:
            return open_torch_store(self._launch, limit_s)
        hosts, port = self._launch.hosts, self._launch.port
        if self._hub is not None:
            hosts, port = ("127.0.0.1",), self._hub.port
        return open_hub_store(hosts, port, self._token or NO_TOKEN, limit_s)

    def pack(self, plain: Any) -> bytes:
        """Return a message, signed where the job has a token."""
        return pack(plain, self._token)

    def unpack(self, message: bytes) -> Any:
        """Return what a message holds; raises ``BadMessage``."""
        return unpack(message, self._token)
