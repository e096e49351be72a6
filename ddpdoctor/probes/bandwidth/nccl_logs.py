"""Collects NCCL's logs from all ranks. On each rank, NCCL logs to a temporary folder while the bench runs."""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import NcclLog
from ddpdoctor.probes.bandwidth.nccl_log import nccl_log_environment, read_nccl_log

if TYPE_CHECKING:
    from typing_extensions import Self

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.probes.bandwidth.group import Group


class NcclLogs:
    """A context manager around the life of the process group."""

    def __init__(self, backend: str) -> None:
        """Create the folder. With another backend than NCCL, this object does nothing."""
        self._folder = (
            TemporaryDirectory(prefix="ddpdoctor-nccl-", ignore_cleanup_errors=True) if backend == "nccl" else None
        )

    def __enter__(self) -> Self:
        """Make NCCL log to the folder."""
        if self._folder is not None:
            os.environ.update(nccl_log_environment(os.environ, self._folder.name))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the folder."""
        self.close()

    def close(self) -> None:
        """Remove the folder. A second call does nothing. It does no harm if NCCL is still writing."""
        if self._folder is not None:
            self._folder.cleanup()

    def share(self, group: Group, conversation: Conversation) -> tuple[NcclLog, ...]:
        """Return the logs of all ranks on rank 0, and this rank's own on the others. Raises ``StoreError``."""
        if self._folder is None:
            return ()
        rank = group.ranks[group.index]
        own = read_nccl_log(self._folder.name, rank)
        if own is not None:
            conversation.send(f"nccl/{rank}", own)
        group.barrier()
        if rank != 0:
            return () if own is None else (own,)
        found = (conversation.look(NcclLog, f"nccl/{other}", f"rank {other}") for other in group.ranks)
        return tuple(log for log in found if log is not None)
