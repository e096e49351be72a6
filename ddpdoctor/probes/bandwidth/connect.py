"""The process group, over what the launch gives: torchrun's store, or one of rank 0's on a free port."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.reach import reach
from ddpdoctor.exchange.store import StoreError, wait_for
from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    import socket

    from ddpdoctor.model.bandwidth import Member, Settings
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.probes.bandwidth.room import Room

ABOVE_OURS = 3
"""torch's own time limit is this many hang timeouts: the bench looks first, and says more."""
LEAST_LIMIT_S = 120.0


def open_process_group(launch: Launch, room: Room, settings: Settings, member: Member, limit_s: float) -> Any:
    """Make the default process group of all ranks; return the store, which must live as long as the group.

    ``limit_s`` holds for reaching rank 0's store. Raises ``StoreError``, and what torch raises.
    """
    import torch
    from torch import distributed

    device = None
    if member.device.startswith("cuda"):
        device = torch.device(member.device)
        torch.cuda.set_device(device)
    store = open_store(launch, room, limit_s)
    distributed.init_process_group(
        settings.backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=max(LEAST_LIMIT_S, ABOVE_OURS * settings.hang_timeout_s)),
        device_id=device,
    )
    return store


def open_store(launch: Launch, room: Room, limit_s: float) -> Any:
    """Return a store of torch that all ranks share. Raises ``StoreError``."""
    from torch.distributed import PrefixStore, TCPStore

    timeout = timedelta(seconds=limit_s)
    if launch.launcher is Launcher.TORCHRUN:
        store = TCPStore(launch.hosts[0], launch.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return PrefixStore(f"ddpdoctor/{launch.run}/group/{room.round}", store)
    if launch.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        room.set("port", b"%d" % store.port)
        return store
    port = _hear_port(room, limit_s)
    host = reach(launch.hosts, port, limit_s, _address)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _hear_port(room: Room, limit_s: float) -> int:
    message = wait_for(room, "port", limit_s)
    if message is None:
        raise StoreError(f"rank 0 opened no store within {limit_s:g} s")
    try:
        return int(message)
    except ValueError:
        raise StoreError(f"rank 0 sent {message[:20]!r} for a port") from None


def _address(connection: socket.socket) -> str:
    """Return the address at which rank 0 answered, of those that it may have."""
    with connection:
        return str(connection.getpeername()[0])
