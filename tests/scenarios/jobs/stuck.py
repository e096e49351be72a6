"""Ranks that wait for what never comes: each function is a job, and its name is the argument."""

import asyncio
import atexit
import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from training import batches, random_batch, run, spawn, train


def stuck_lock():
    """A rank waits for a lock that a thread of its own never gives back."""
    lock = threading.Lock()

    def hold():
        with lock:
            time.sleep(100000)

    def load(step):
        if dist.get_rank() == 1 and step == 20:
            threading.Thread(target=hold, daemon=True).start()
            time.sleep(0.2)
            lock.acquire()  # FAULT
        return torch.randn(4, 8)

    train(load)


def stuck_gil():
    """A rank waits in C and holds the GIL, so that no Python thread of it can answer."""

    def load(step):
        if dist.get_rank() == 0 and step == 10:
            lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
            lock(mutex)
            # A signal would end a sleep, and the job would go on while it is stopped.
            lock(mutex)  # FAULT
        return torch.randn(4, 8)

    train(load)


def stuck_spin():
    """A rank spins over several lines of one function."""

    def load(step):
        ready = False
        tries = 0
        while dist.get_rank() == 1 and step == 15 and not ready:  # FAULT
            tries += 1  # FAULT
            ready = tries < 0  # FAULT
        return torch.randn(4, 8)

    train(load)


def stuck_poll():
    """A rank polls for a file that never comes; the look is taken by a function of its own."""

    def is_there(path):
        return os.path.exists(path)

    def wait_for(path):
        while not is_there(path):  # FAULT
            time.sleep(0.2)  # FAULT

    def load(step):
        if dist.get_rank() == 0 and step == 20:
            wait_for("/nowhere/shard-0")
        return torch.randn(4, 8)

    train(load)


def stuck_hook():
    """A hook on a gradient never comes back, in the middle of a backward."""
    answered = threading.Event()

    def report(grad):
        if dist.get_rank() == 3:
            answered.wait()  # FAULT

    def load(step):
        rows = torch.randn(4, 8, requires_grad=True) * 2
        if step == 20:
            rows.register_hook(report)
        return rows

    train(load)


def stuck_before_init():
    """A rank is held up on its way to init_process_group."""
    if os.environ["RANK"] == "1":
        time.sleep(100000)  # FAULT
    train()


def stuck_loader_worker():
    """A DataLoader worker of one rank never returns a sample."""

    def read(i):
        if i == 33:
            time.sleep(100000)  # FAULT
        return torch.randn(8)

    def main():
        model = DDP(torch.nn.Linear(8, 2))
        for batch in batches(read):
            model(batch).mean().backward()

    run(main)


def stuck_dead_producer():
    """The process that fills the queue of a rank has ended too early, and the rank waits for its next batch."""
    batches = multiprocessing.Queue(maxsize=4)

    def produce(steps):
        for step in range(steps):
            batches.put(step)

    def load(step):
        if step == 0:
            steps = 20 if dist.get_rank() == 1 else 60
            multiprocessing.Process(target=produce, args=(steps,), daemon=True).start()
        batches.get()  # FAULT
        return torch.randn(4, 8)

    train(load)


def stuck_dead_child():
    """A rank waits for a result of a process of its own that has died."""

    def work(results):
        os.kill(os.getpid(), signal.SIGKILL)
        results.put(1)

    def main():
        if dist.get_rank() == 1:
            context = multiprocessing.get_context("fork")
            results = context.Queue()
            worker = context.Process(target=work, args=(results,))
            worker.start()
            results.get()  # FAULT

    run(main)


def stuck_after_thread_error():
    """A thread that reads ahead has ended with an error, and the training loop waits for its next batch."""
    batches = queue.Queue()

    def read_ahead(rank):
        for step in range(60):
            if rank == 2 and step == 20:
                raise OSError("no such shard")
            batches.put(torch.randn(4, 8))

    def load(step):
        if step == 0:
            threading.Thread(target=read_ahead, args=(dist.get_rank(),), daemon=True).start()
        return batches.get()  # FAULT

    train(load)


def stuck_everywhere():
    """All ranks stand in the same place, in no collective."""

    def load(step):
        if step == 12:
            time.sleep(100000)  # FAULT
        return torch.randn(4, 8)

    train(load)


def stuck_pipeline():
    """A stage of a pipeline has received its input, and waits for a signal; DDP reduces over all stages."""

    def pass_on(rank, step):
        value = torch.zeros(3)
        if rank > 0:
            dist.recv(value, rank - 1)
        if rank == 1 and step == 10:
            signal.pause()  # FAULT
        if rank < dist.get_world_size() - 1:
            dist.send(value, rank + 1)

    def main():
        model = DDP(torch.nn.Linear(8, 2))
        for step in range(40):
            pass_on(dist.get_rank(), step)
            model(torch.randn(4, 8)).mean().backward()

    run(main)


def stuck_awaited():
    """Batches come from asyncio tasks; one of rank 1 fails unnoticed, and the trainer awaits its batch."""

    async def make(step, queue):
        text = "0.5;" if (step, dist.get_rank()) == (20, 1) else "0.5"
        await queue.put(torch.full((4, 8), float(text)))

    async def epoch(model):
        queue = asyncio.Queue()
        tasks = []
        for step in range(60):
            tasks.append(asyncio.ensure_future(make(step, queue)))
            model(await queue.get()).mean().backward()  # FAULT

    run(lambda: asyncio.run(epoch(DDP(torch.nn.Linear(8, 2)))))


def evaluate_in_vain(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    while number == 1 and not Path(folder, "weights").exists():
        time.sleep(0.1)  # FAULT stuck_evaluation
    dist.all_reduce(torch.ones(4))


def stuck_evaluation():
    """Rank 0 evaluates by two spawned ranks with a group of their own, the second of which waits for a file in vain."""

    def load(step):
        if dist.get_rank() == 0 and step == 20:
            torch.multiprocessing.spawn(evaluate_in_vain, args=(tempfile.mkdtemp(),), nprocs=2)
        return torch.randn(4, 8)

    train(load)


def stuck_extension():
    """A rank builds an extension, and the builder never ends."""
    from torch.utils.cpp_extension import load_inline

    def main():
        if dist.get_rank() == 1:
            load_inline("answer", "int answer() { return 42; }", functions=["answer"])  # FAULT

    run(main)


def stuck_flock(path):
    """Rank 0 keeps a lock on a file and goes into a collective; rank 1 wants the lock first."""
    dist.init_process_group("gloo")
    cache = open(path, "w")  # noqa: SIM115 - held for as long as the job lives
    if dist.get_rank() == 0:
        fcntl.flock(cache, fcntl.LOCK_EX)
    dist.barrier()
    if dist.get_rank() == 1:
        fcntl.flock(cache, fcntl.LOCK_EX)  # FAULT
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def stuck_input():
    """A rank asks a question that nobody will answer."""

    def main():
        if dist.get_rank() == 1:
            reader, _ = os.pipe()
            os.dup2(reader, 0)
            input("Continue? ")  # FAULT

    run(main)


def stuck_left_lock(path):
    """All ranks wait for the lock of a build, before they meet."""
    from torch.utils.file_baton import FileBaton

    baton = FileBaton(path)
    if not baton.try_acquire():
        baton.wait()  # FAULT
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


def stuck_past_limit(how, flag):
    """Rank 0 prepares data past torch's own time limit: it is still at it when rank 1 gives up, or comes just after."""
    gave_up, came = Path(f"{flag}.gave-up"), Path(f"{flag}.came")
    here = [Path(f"{flag}.here-{rank}") for rank in range(2)]

    def wait_for(path):
        while not path.exists():
            time.sleep(0.05)

    def tokenize():
        while how == "still" or not gave_up.exists():  # FAULT
            sum(n * n for n in range(20_000))  # FAULT

    # On a busy machine torch may be imported in one rank much sooner than in the other.
    here[int(os.environ["RANK"])].touch()
    for path in here:
        wait_for(path)
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    if dist.get_rank() == 0:
        tokenize()
        came.touch()
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        gave_up.touch()
        if how == "late":
            wait_for(came)
        raise


def sleep_at_step_10(step):
    if dist.get_rank() == 1 and step == 10:
        time.sleep(100000)  # FAULT stuck_spawn
    return random_batch(step)


def stuck_spawn():
    """A rank that the script started itself never comes back from a function."""

    spawn(sleep_at_step_10)


def stuck_store(how, port):
    """Gives the job's store an address of its own. Under torchrun nobody serves it there, unless rank 0 is to."""

    def by_variable(port):
        os.environ["MASTER_PORT"] = port  # FAULT
        dist.init_process_group("gloo")

    def by_url(port):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)  # FAULT

    if how == "served":
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    (by_url if how == "url" else by_variable)(port)
    dist.barrier()
    dist.destroy_process_group()


def own_limit():
    """A watchdog of each rank ends it after seconds without a step; rank 2 is stuck, and the others' fire first."""
    last = [time.monotonic()]

    def watch(limit_s):
        while time.monotonic() - last[0] < limit_s:
            time.sleep(0.1)
        os._exit(17)

    def load(step):
        rank = dist.get_rank()
        last[0] = time.monotonic()
        if rank == 0:
            faulthandler.dump_traceback_later(2, exit=True)
        elif step == 0:
            threading.Thread(target=watch, args=(2 + rank,), daemon=True).start()
        if rank == 2 and step == 20:
            threading.Event().wait()  # FAULT
        return torch.randn(4, 8)

    train(load)


def stopped_signal():
    """A rank is stopped by SIGSTOP."""

    def load(step):
        if dist.get_rank() == 1 and step == 15:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.randn(4, 8)

    train(load)


TRACER = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, os.getppid(), 0, 0):
    raise SystemExit("ptrace: " + os.strerror(ctypes.get_errno()))
time.sleep(100000)
"""


def stopped_debugger():
    """A debugger has a rank stopped."""

    def load(step):
        if dist.get_rank() == 1 and step == 15:
            subprocess.Popen([sys.executable, "-c", TRACER])
            time.sleep(3)
        return torch.randn(4, 8)

    train(load)


def stopped_before_init():
    """A rank is stopped before it joins the group."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    train()


def stopped_by_peer():
    """A rank is stopped by another process, while half of the ranks go on for a while."""

    def stop(rank):
        pids = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            os.kill(pids[2], signal.SIGSTOP)

    def main():
        rank = dist.get_rank()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        stop(rank)
        for _ in range(100):
            dist.all_reduce(torch.ones(4), group=halves[rank // 2])

    run(main)


def missing_world():
    """The script asks for a larger world than was started."""
    train(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]) + 1)


def missing_node():
    """The script was written for two machines, and one was started."""
    train(rank=int(os.environ["RANK"]), world_size=4)


def missing_duplicate():
    """Two ranks take the same number."""
    train(rank=min(int(os.environ["RANK"]), 1), world_size=int(os.environ["WORLD_SIZE"]))


def exit_hang_thread():
    """A thread that is no daemon keeps a rank alive after its training."""

    def upload():
        time.sleep(100000)  # FAULT

    def load(step):
        if dist.get_rank() == 1 and step == 5:
            threading.Thread(target=upload).start()
        return torch.randn(4, 8)

    train(load)


def exit_hang_atexit():
    """A function that runs at the exit of a rank never returns."""

    def close_log():
        time.sleep(100000)  # FAULT

    def load(step):
        if dist.get_rank() == 0 and step == 5:
            atexit.register(close_log)
        return torch.randn(4, 8)

    train(load)


def exit_hang_child():
    """A process that a rank has started is never asked to end."""

    def serve():
        time.sleep(100000)  # FAULT

    def load(step):
        if dist.get_rank() == 0 and step == 5:
            multiprocessing.Process(target=serve).start()
        return torch.randn(4, 8)

    train(load)


def exit_hang_executor():
    """Python waits at its end for an executor's thread, which waits for ever."""
    gate = threading.Event()
    pool = ThreadPoolExecutor(2)

    def upload():
        gate.wait()  # FAULT

    def load(step):
        if dist.get_rank() == 3 and step == 5:
            pool.submit(upload)
        return torch.randn(4, 8)

    train(load)


def exit_hang_queue():
    """A queue's feeder thread cannot get rid of what nobody reads."""
    results = multiprocessing.Queue()

    def load(step):
        if dist.get_rank() == 1 and step == 5:
            results.put(bytes(10_000_000))
        return torch.randn(4, 8)

    train(load)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
