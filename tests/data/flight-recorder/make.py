"""Makes entries of torch's own recorder for "nccl2" without a GPU: python make.py FOLDER, with torch 2.15.

A backend written in Python takes the name. Calls that it refuses leave entries that never complete, as a hang does.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch._C._distributed_c10d as native
import torch.distributed as dist

RANK, WORLD = 1, 4


class RefusedError(RuntimeError):
    """What a call raises that is to stay pending."""


class Nccl2(native.Backend):
    """Completes each call at once, by copying what it is given; or refuses it."""

    refuses = False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torch keeps the entries."""
        return "nccl2"

    def _done(self, *_: object, **__: object) -> dist.Work:
        if Nccl2.refuses:
            raise RefusedError
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return native._create_work_from_future(future)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_: object) -> dist.Work:
        """Fill all outputs with the own input: every rank has the same model."""
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._done()

    allreduce = broadcast = all_gather_single = send = recv = barrier = _done


def main(folder: Path) -> None:
    """Write what the recorder holds, as JSON and as the dump of its own abort hook is written."""
    dist.Backend.register_backend("stand-in", lambda _store, rank, size, _limit: Nccl2(rank, size), devices=["cpu"])
    dist.init_process_group("stand-in", rank=RANK, world_size=WORLD, store=dist.HashStore())
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.send(tensor, 0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    pair = dist.new_group([1, 3])
    Nccl2.refuses = True
    calls = (
        lambda: dist.all_reduce(tensor, group=pair),
        lambda: model(tensor).sum().backward(),
        lambda: dist.recv(tensor, 2),
        lambda: dist.send(tensor, 3, group=pair),
        lambda: dist.all_gather_into_tensor(torch.ones(16), tensor),
        dist.barrier,
    )
    for call in calls:
        with contextlib.suppress(RuntimeError):
            call()
    (folder / "nccl2-2.15.json").write_bytes(native._dump_fr_trace_json(backend="nccl2"))
    (folder / "nccl2-2.15.pickle").write_bytes(native._dump_fr_trace(includeStackTraces=False, backend="nccl2"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
