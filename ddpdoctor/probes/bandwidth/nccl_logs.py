"""What NCCL says of itself, from all ranks: each has it log to a folder of its own for as long as the bench lasts."""

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
    """A context around the life of the process group."""

    def __init__(self, backend: str) -> None:
        """Do nothing for another backend."""
        self._folder = (
            TemporaryDirectory(prefix="ddpdoctor-nccl-", ignore_cleanup_errors=True) if backend == "nccl" else None
        )

    def __enter__(self) -> Self:
        """Have NCCL log."""
        if self._folder is not None:
            os.environ.update(nccl_log_environment(os.environ, self._folder.name))
        return self

    def __exit__(self, *_: object) -> None:
        """Take the folder away."""
        self.close()

    def close(self) -> None:
        """Take the folder away; a second call does nothing. NCCL may still be writing, and does not mind."""
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
