"""Healthy jobs that look like faulty ones: each function is a job, and its name is the argument."""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from training import batches, loop, run, spawn, train


def clean_one_process():
    """One process without a group: loader workers, a pause longer than the hang timeout."""
    model = torch.nn.Linear(8, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, num_workers=2):
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
    time.sleep(6)


def clean_slow_rank0():
    """Rank 0 exports, part by part, for twice the hang timeout, while the others wait."""
    HANG_TIMEOUT_S = 4

    def write_part(folder, part):
        torch.save(torch.zeros(10), os.path.join(folder, f"{part}.pt"))
        time.sleep(0.4)

    def pause():
        time.sleep(0.2)

    def export():
        end = time.monotonic() + 2 * HANG_TIMEOUT_S
        with tempfile.TemporaryDirectory() as folder:
            while time.monotonic() < end:
                write_part(folder, "part")
                pause()

    def load(step):
        if dist.get_rank() == 0 and step == 20:
            export()
        return torch.randn(4, 8)

    train(load)


def clean_rank0_evaluates():
    """Rank 0 evaluates without collectives for longer than the hang timeout, batch by batch; the others wait."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def forward(self, x):
            return self.layer(x)

    def evaluate(model):
        model.eval()
        loss = 0.0
        with torch.no_grad():
            for (x,) in DataLoader(TensorDataset(torch.randn(60, 8)), batch_size=4):
                time.sleep(0.4)  # a larger model
                loss += model.module(x).mean().item()
        model.train()
        return loss

    def main():
        model = DDP(Net())
        for step in range(40):
            model(torch.randn(4, 8)).mean().backward()
            if step == 20 and dist.get_rank() == 0:
                print(evaluate(model))

    run(main)


BLOCK = bytes(2**20)


COUNTS = "import sys\nfor n in range(10**12): pass"


SERVES = """
import http.server, sys
class Endless(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(65536))
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Endless)
print(server.server_port, flush=True)
server.serve_forever()
"""


def clean_prepares(how, longest_s):
    """Healthy: rank 0 prepares the data in the way that is asked for while the others wait for it in a barrier.

    It works until the report of that is there, and a little longer; where its work counts as progress, and nothing is
    reported, for three hang timeouts.
    """
    report = Path(os.environ.get("DDPDOCTOR_RUN", "/nonexistent")) / "report.json"

    def has_time():
        return time.monotonic() < end and not report.exists()

    def tokenize():
        total = 0
        while has_time():
            total += sum(n * n for n in range(50_000))  # python
        return total

    def multiply():
        matrix = torch.rand(500, 500)
        while has_time():
            matrix = torch.tanh(matrix @ matrix)  # native

    def compile_parts():
        with subprocess.Popen([sys.executable, "-c", COUNTS], env={"PATH": os.environ["PATH"]}) as child:
            while has_time():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.5)  # child
            child.kill()

    def read_files():
        with tempfile.NamedTemporaryFile() as file:
            file.write(8 * BLOCK)
            file.flush()
            while has_time():
                Path(file.name).read_bytes()  # read
                time.sleep(0.05)

    def write_files():
        while has_time():
            with tempfile.TemporaryFile() as file:
                file.write(BLOCK)  # write
            time.sleep(0.05)

    def download():
        server = subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE, start_new_session=True)
        with urllib.request.urlopen(f"http://127.0.0.1:{int(server.stdout.readline())}/") as answer:
            while has_time():
                answer.read(2**16)  # download
                time.sleep(0.01)
        server.kill()

    def sleep():
        while has_time():
            time.sleep(0.2)  # sleep

    forms = {
        "python": tokenize,
        "native": multiply,
        "child": compile_parts,
        "read": read_files,
        "write": write_files,
        "download": download,
        "sleep": sleep,
    }
    dist.init_process_group("gloo")
    end = time.monotonic() + float(longest_s)
    if dist.get_rank() == 0:
        forms[how]()
    dist.barrier()
    dist.destroy_process_group()


def clean_groups():
    """Two groups with different numbers of collectives, point-to-point, asynchronous calls, a root."""

    def main():
        rank = dist.get_rank()
        pair = dist.new_group([0, 1])
        for _ in range(30):
            if rank < 2:
                dist.all_reduce(torch.ones(4), group=pair)
            if rank == 0:
                dist.send(torch.ones(2), 2)
                dist.broadcast(torch.ones(3), src=0)
            else:
                if rank == 2:
                    dist.recv(torch.zeros(2), 0)
                dist.broadcast(torch.zeros(3), src=0)
            work = dist.all_reduce(torch.ones(8), async_op=True)
            work.wait()
            dist.broadcast_object_list([rank], src=1)

    run(main)


def clean_groups_apart():
    """Two halves of the job with much different work; one waits at the end for longer than the hang timeout."""

    def main():
        rank = dist.get_rank()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = DDP(torch.nn.Linear(8, 2), process_group=halves[rank // 2])
        for _ in range(10 if rank < 2 else 60):
            model(torch.randn(4, 8)).mean().backward()
            time.sleep(0.12)

    run(main)


def clean_point_to_point():
    """Point-to-point calls of all forms among some ranks, with collectives of all between them, two models, destroy."""

    def exchange(rank):
        if rank == 0:
            dist.send(torch.full((3,), 7.0), 1, tag=5)
            dist.isend(torch.ones(2, dtype=torch.complex64), dst=2).wait()
        elif rank == 1:
            got = torch.zeros(3)
            assert dist.recv(got, tag=5) == 0
            assert got.tolist() == [7.0, 7.0, 7.0]
        else:
            got = torch.zeros(2, dtype=torch.complex64)
            work = dist.irecv(got, src=0)
            work.wait()
            assert got.sum() == 2

    def ring(rank, world):
        out, back = torch.tensor([float(rank)]), torch.zeros(1)
        ops = [dist.P2POp(dist.isend, out, (rank + 1) % world), dist.P2POp(dist.irecv, back, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert back.item() == (rank - 1) % world

    def main():
        rank, world = dist.get_rank(), dist.get_world_size()
        model = DDP(torch.nn.Linear(8, 2))
        for step in range(10):
            exchange(rank)
            if step % 2:
                ring(rank, world)
            model(torch.randn(4, 8)).mean().backward()
            dist.all_reduce(torch.ones(4))

    run(main)


def clean_call_sites():
    """One broadcast, gather and scatter is called from a line of its own on rank 0; find_unused_parameters."""

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left = torch.nn.Linear(8, 2)
            self.right = torch.nn.Linear(8, 2)

        def forward(self, x, which):
            return self.left(x) if which else self.right(x)

    def choose(rank, step):
        if rank == 0:
            seed = torch.tensor([step])
            dist.broadcast(seed, src=0)
        else:
            seed = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(seed, src=0)
        return int(seed)

    def spread(rank, world):
        mine = torch.zeros(3)
        if rank == 0:
            dist.scatter(mine, [torch.full((3,), float(i)) for i in range(world)])
        else:
            dist.scatter(mine)
        return mine

    def collect(rank, world, mine):
        if rank == 0:
            parts = [torch.zeros(3) for _ in range(world)]
            dist.gather(mine, parts)
            return sum(parts)
        dist.gather(mine)
        return None

    def main():
        rank, world = dist.get_rank(), dist.get_world_size()
        model = DDP(Branches(), find_unused_parameters=True)
        for step in range(30):
            seed = choose(rank, step)
            model(torch.randn(4, 8), (seed + rank) % 2).mean().backward()
            total = collect(rank, world, spread(rank, world))
            if rank == 0 and step % 10 == 0:
                print(step, total.sum().item())

    run(main)


def clean_accumulate():
    """Gradient accumulation under no_sync, evaluation without gradients, forked loader workers."""

    def read(i):
        return torch.randn(8)

    def main():
        model = DDP(torch.nn.Linear(8, 2))
        for batch in batches(read):
            with model.no_sync():
                model(batch).mean().backward()
            model(batch).mean().backward()
        with torch.no_grad():
            model(torch.randn(4, 8))

    run(main)


def clean_join():
    """Uneven inputs under join."""

    def main():
        model = DDP(torch.nn.Linear(8, 2))
        with model.join():
            for _ in range(20 + 5 * dist.get_rank()):
                model(torch.randn(4, 8)).mean().backward()

    run(main)


def clean_spawn_address():
    """The script starts its ranks itself, and names the place where they meet itself."""
    spawn(join="tcp://127.0.0.1:{port}")


def clean_two_models():
    """Two models in turn, a communication hook, a sharded optimizer, a thread that logs, a rank that writes last."""

    def log():
        while True:
            time.sleep(0.5)

    def train(maker, judge, steps):
        opt_maker = ZeroRedundancyOptimizer(maker.parameters(), torch.optim.Adam, lr=0.01)
        opt_judge = torch.optim.Adam(judge.parameters())
        for _ in range(steps):
            opt_judge.zero_grad()
            judge(maker(torch.randn(4, 4)).detach()).mean().backward()
            opt_judge.step()
            opt_maker.zero_grad()
            judge(maker(torch.randn(4, 4))).mean().backward()
            opt_maker.step()

    dist.init_process_group("gloo")
    threading.Thread(target=log, daemon=True).start()
    rank = dist.get_rank()
    maker = DDP(torch.nn.Linear(4, 8))
    judge = DDP(torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)))
    maker.register_comm_hook(None, fp16_compress_hook)
    train(maker, judge, 30)
    dist.barrier()
    del maker, judge  # see training.leave
    dist.destroy_process_group()
    if rank == 0:
        time.sleep(6)


def clean_caught_errors():
    """Errors that the script expects and catches; the wish to stop comes from one rank, and all leave by sys.exit."""

    def read(step):
        if step % 7 == dist.get_rank():
            raise ValueError("bad record")
        return torch.randn(4, 8)

    def load(step):
        try:
            return read(step)
        except ValueError:
            return torch.zeros(4, 8)

    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 2))
    inbox = queue.Queue()
    for step in range(40):
        try:
            inbox.get(timeout=0.01)
        except queue.Empty:
            pass
        model(load(step)).mean().backward()
        stop = [step == 30]
        dist.broadcast_object_list(stop, src=2)
        if stop[0]:
            break
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()
    sys.exit(0)


def clean_compile():
    """torch.compile around DDP with a static graph and activation checkpointing."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(8, 8)
            self.head = torch.nn.Linear(8, 2)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    def main():
        loop(DDP(Net(), static_graph=True), steps=20)
        loop(torch.compile(DDP(torch.nn.Linear(8, 2))), steps=10)

    run(main)


def clean_nested(role="train"):
    """A rank runs other jobs beside its training: a server with a group, made before its own, and a torchrun.

    Errors of tasks and calls in pools are handled, and a rank is in an except when all make a call.
    """

    def serve():
        meeting = f"file://{tempfile.mkdtemp()}/meet"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        print("ready", flush=True)
        time.sleep(600)

    def fail():
        raise LookupError

    def evaluate():
        launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        env = {k: v for k, v in os.environ.items() if k not in launch and not k.startswith("TORCHELASTIC")}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([sys.executable, *torchrun, __file__, "clean_nested", "evaluate"], check=True, env=env)

    def load(step):
        if dist.get_rank() == 0 and step == 20:
            evaluate()
        try:
            if dist.get_rank() == 0:
                pool.submit(fail).result()
            dist.barrier()
        except LookupError:
            dist.barrier()
        return torch.randn(4, 8)

    if role == "serve":
        serve()
    elif role == "evaluate":
        run(lambda: dist.all_reduce(torch.ones(1)))
    else:
        pool = ThreadPoolExecutor(1)
        with subprocess.Popen([sys.executable, __file__, "clean_nested", "serve"], stdout=subprocess.PIPE) as server:
            server.stdout.readline()
            train(load)
            server.kill()


def clean_model_parallel():
    """Two pairs of ranks with a model of their own each, in groups of their own, that pass tensors to each other.

    The first pair takes longer for each step, so rank 2 waits for its tensors, and rank 3 for rank 2. Neither is slow.
    """

    def main():
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = DDP(torch.nn.Linear(8, 2 + rank // 2), process_group=pairs[rank // 2])
        for _ in range(20):
            time.sleep(0.05 * (rank < 2))
            model(torch.randn(4, 8)).mean().backward()
            if rank == 1:
                dist.send(torch.ones(2), 2)
            if rank == 2:
                dist.recv(torch.ones(2), 1)
        dist.monitored_barrier()

    run(main)


def clean_skips():
    """Ranks skip a step together, evaluate at will, train by their own clocks, and call under a condition."""

    def main():
        rank = dist.get_rank()
        model = DDP(torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            optimizer.zero_grad()
            loss = model(torch.full((4, 8), float("inf") if rank == 1 and step == 9 else 1.0)).mean()
            finite = torch.isfinite(loss).float()
            dist.all_reduce(finite, dist.ReduceOp.MIN)
            if not finite:
                continue
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 5 == 4:
                with torch.no_grad():
                    model(torch.ones(4, 8))
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            model.module(torch.ones(4, 8)).mean().backward()
        if rank == 0:
            objects = [{"loss": 1.0}]
            dist.broadcast_object_list(objects)
        else:
            objects = [None]
            dist.broadcast_object_list(objects)

    run(main)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
