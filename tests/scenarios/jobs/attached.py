"""Hangs, or trains on, until the test says so through FOLDER, and then ends well.

Usage: attached.py MODE FOLDER. Rank 1 is at fault: it waits until the test opens FOLDER/release, a named pipe.
"""

import ctypes
import os
import pathlib
import socket
import sys
import threading

import torch
import torch.distributed as dist

torch.set_num_threads(1)
MODE, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
RELEASE = FOLDER / "release"
RAS = {
    "new": [b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n", b'{"nccl_version": "2.29.7", "communicators": []}\n'],
    "old": [
        b"SERVER PROTOCOL 2\n",
        b"OK\n",
        b"ERROR: Unknown command SET FORMAT json\n",
        b"Job summary\n===========\n",
    ],
}


def wait_for_the_test():
    with open(RELEASE) as pipe:  # FAULT
        pipe.read()


class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        wait_for_the_test()
        return torch.ones(1)


def load():
    for batch in torch.utils.data.DataLoader(Stuck(), num_workers=1):
        dist.all_reduce(batch)


def hold_the_gil():
    ctypes.PyDLL(None).open(os.fsencode(RELEASE), os.O_RDONLY)


def train(rank):
    step = torch.zeros(1)
    while not step:
        step += rank == 0 and RELEASE.with_name("end").exists()
        dist.all_reduce(step)


def serve_ras(answers):
    """Answer each line as NCCL's RAS does, and close after the last."""
    server = socket.create_server(("127.0.0.1", int(os.environ["NCCL_RAS_ADDR"].rpartition(":")[2])))
    while True:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines:
            for answer, line in zip(answers, lines):
                with open(FOLDER / "ras-asked", "ab") as reported:
                    reported.write(line)
                connection.sendall(answer)


def serve_debugging(rank):
    """Do what torch.distributed.debug.start_debug_server does, without the page that rank 0 serves."""
    import torch.distributed.debug._handlers
    from torch._C._distributed_c10d import _WorkerServer
    from torch.distributed.debug._store import tcpstore_client

    server = _WorkerServer("::", 0)
    tcpstore_client().set(f"rank{rank}", f"http://{socket.gethostname()}:{server.port}")
    return server


def dump_on_demand(rank):
    """Do what a rank with NCCL does: a byte in the pipe makes it write a dump."""
    path = FOLDER / f"pipe_{rank}.pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def watch():
        import select

        select.select([pipe], [], [])
        part = FOLDER / "part"
        part.write_bytes(b"dump of %d" % rank)
        part.rename(FOLDER / f"dump_{rank}")

    threading.Thread(target=watch, daemon=True).start()


def main():
    dist.init_process_group("gloo", **JOIN)
    rank = dist.get_rank()
    server = serve_debugging(rank) if MODE == "server" else None
    if MODE.startswith("ras") and rank == 0:
        threading.Thread(target=serve_ras, args=(RAS[MODE[4:]],), daemon=True).start()
    if MODE == "pipe" and rank == 0:
        dump_on_demand(rank)
    dist.barrier()
    (FOLDER / f"at_{rank}").write_text(str(os.getpid()))
    if MODE == "moving":
        train(rank)
    elif rank != 1:
        dist.all_reduce(torch.ones(1))  # WAITS
    elif MODE == "loader":
        load()
    else:
        hold_the_gil() if MODE == "gil" else wait_for_the_test()
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    if server:
        server.shutdown()
    dist.destroy_process_group()


def spawned(rank, world_size, address):
    JOIN.update(rank=rank, world_size=world_size, init_method=address)
    main()


JOIN = {}
for name, theirs in (("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS")):  # srun
    if f"SLURM_{theirs}" in os.environ:
        os.environ.setdefault(name, os.environ[f"SLURM_{theirs}"])
for name in ("RANK", "WORLD_SIZE"):  # mpirun
    if f"OMPI_COMM_WORLD_{name[-4:]}" in os.environ:
        os.environ[name] = os.environ[f"OMPI_COMM_WORLD_{name[-4:]}"]
if __name__ == "__main__":
    if MODE == "spawn":
        torch.multiprocessing.spawn(spawned, (2, f"tcp://127.0.0.1:{sys.argv[3]}"), nprocs=2)
    elif "TORCH_WORKER_SERVER_SOCKET" in os.environ:
        from torch.distributed.elastic.control_plane import worker_main

        with worker_main():
            main()
    else:
        main()
