"""What happens around a training, as signals and full disks: each function is a job, and its name is the argument."""

import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from training import run


def endless():
    """Trains until somebody stops it."""

    def main():
        while True:
            dist.all_reduce(torch.ones(4))
            time.sleep(0.01)
            if dist.get_rank() == 0:
                print("step", flush=True)

    run(main)


def until_warned():
    """Trains until a batch system warns of the end, and then ends well."""
    warned = []
    signal.signal(signal.SIGUSR1, lambda number, frame: warned.append(number))
    dist.init_process_group("gloo")
    while True:
        reported = torch.tensor(float(len(warned)))
        dist.all_reduce(reported)
        if reported:
            break
        time.sleep(0.01)
        if dist.get_rank() == 0:
            print("step", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print("ended by SIGUSR1", flush=True)


def ignores_sigterm():
    """Hangs, and has a SIGTERM handler of its own that ends nothing."""

    def main():
        signal.signal(signal.SIGTERM, lambda *unused: print("not now", flush=True))
        dist.all_reduce(torch.ones(4))
        while dist.get_rank() == 1:
            time.sleep(1000)  # FAULT

    run(main)


def long_pause():
    """One rank pauses until that has been reported as a hang, and then goes on until the report is withdrawn."""
    REPORTED = Path(os.environ["DDPDOCTOR_RUN"]) / "end.json"

    def wait_for_report():
        while not REPORTED.exists():
            time.sleep(0.1)

    def main():
        for _ in range(10):
            dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            pause = threading.Thread(target=wait_for_report)
            pause.start()
            pause.join()  # FAULT
        reported = torch.ones(1)
        while reported:
            time.sleep(0.1)
            reported.fill_(REPORTED.exists())
            dist.broadcast(reported, 0)

    run(main)


def second_attempt():
    """Fails at its first attempt and ends well at the second.

    The second joins no group: Gloo's own connect fails in about half of all restarts on one host, under torchrun too.
    """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        return
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise OSError("the first attempt")  # FAULT
    dist.all_reduce(torch.ones(4))


def fills_disk():
    """Fills the disk that its run folder is on, once or again and again, and then hangs."""

    def fill(path):
        try:
            with open(path, "ab") as file:
                while True:
                    file.write(b"x" * 65536)
                    file.flush()
        except OSError:
            pass

    def fill_again(path):
        while True:
            fill(path)
            time.sleep(0.01)

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        fill(os.environ["FILL"])
    if dist.get_rank() == 0 and "AGAIN" in os.environ:
        threading.Thread(target=fill_again, args=(os.environ["FILL"],), daemon=True).start()
    dist.barrier()
    while dist.get_rank() == 1:
        time.sleep(1000)  # FAULT
    dist.all_reduce(torch.ones(4))


def removes_its_folder(status):
    """Removes its working directory, in which the run folder is, and ends with a status of its own."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        shutil.rmtree(Path.cwd())
    dist.barrier()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    sys.exit(int(status))


def prints_everything():
    """Writes what jobs write, on both streams: bytes, a bar without an end of line, warnings; ends as it is told to."""
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(2, 1), device_ids=None)
    warnings.warn("of the script", stacklevel=1)
    dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(dist.get_world_size()))
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        sys.stderr.write(f"\r{step} of 3")
        sys.stderr.flush()
    sys.stdout.buffer.write(bytes(range(256)))
    sys.stdout.flush()
    print("no end of line", end="", flush=True)
    try:
        dist.all_reduce("no tensor")
    except TypeError:
        traceback.print_exc()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()
    how = os.environ["ENDS"]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise RuntimeError(how)
    sys.exit(int(how))


def transport_dropped(begun):
    """Ranks that reduce in small steps for as long as the network lets them."""
    dist.init_process_group("gloo")
    for step in range(10**9):
        dist.all_reduce(torch.ones(256))  # FAULT
        if step == 50 and dist.get_rank() == 0:
            Path(begun).touch()


def loader_workers(workers, epochs):
    """Starts loader workers in each epoch; says what the run folder and the rank itself hold after each."""
    workers, epochs = int(workers), int(epochs)
    folder = os.environ["DDPDOCTOR_RUN"]

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return workers

        def __getitem__(self, index):
            return torch.full((4,), float(index))

    def files():
        return [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]

    def rings():
        return [name for name in files() if name.endswith(".ring")]

    def kib_on_disk():
        return sum(os.stat(name).st_blocks for name in files() if os.path.exists(name)) // 2

    def resident_kib():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024

    def wait_until_swept():
        """Wait for the watcher, which takes away what ended workers have left: the ranks' rings stay."""
        limit = time.monotonic() + 60
        while len(rings()) > dist.get_world_size() and time.monotonic() < limit:
            time.sleep(0.02)

    dist.init_process_group("gloo")
    loader = torch.utils.data.DataLoader(Samples(), batch_size=1, num_workers=workers)
    for epoch in range(epochs):
        for batch in loader:
            dist.all_reduce(batch)
        wait_until_swept()
        print(epoch, len(files()), kib_on_disk(), resident_kib(), flush=True)
    raise LookupError("the journal still has room for this")  # FAULT


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
