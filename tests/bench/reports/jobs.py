"""Jobs rebuilt from public reports: each "# job:" begins a script, which is run with the imports above the first."""

import contextlib
import copy
import hashlib
import os
import random
import resource
import signal
import socket
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


# job: datasets_5360
# https://github.com/huggingface/datasets/issues/5360
# report: an unsharded IterableDataset gives all ranks the same samples
# truth: {"code": "duplicate-data", "ranks": [0, 1]}
class Stream(IterableDataset):
    def __iter__(self):
        for index in range(160):
            yield torch.full((4,), float(index))


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in DataLoader(Stream(), batch_size=8):
    opt.zero_grad()
    model(batch).mean().backward()
    opt.step()
dist.destroy_process_group()


# job: fairseq_4619
# https://github.com/facebookresearch/fairseq/issues/4619
# report: training is done, and the logger's thread keeps rank 0 from ending
# truth: {"code": "exit-hang", "ranks": [0]}
def upload(finished):
    finished.wait()


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    threading.Thread(target=upload, args=(threading.Event(),)).start()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()

# job: funasr_3472
# https://github.com/modelscope/FunASR/pull/3472
# report: no_sync around the micro-batch of the optimizer step in place of the others
# truth: {"code": "grad-drift", "ranks": [0, 1], "also": ["param-drift"]}
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
accumulate = 2
for index in range(12):
    quiet = model.no_sync() if index % accumulate else contextlib.nullcontext()
    with quiet:
        model(torch.randn(8, 4)).square().mean().backward()
    if (index + 1) % accumulate == 0:
        opt.step()
        opt.zero_grad()
dist.barrier()
dist.destroy_process_group()

# job: icefall_226
# https://github.com/k2-fsa/icefall/issues/226
# report: forward through model.module: DDP never averages the gradients
# truth: {"code": "grad-drift", "ranks": [0, 1], "also": ["param-drift"]}
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(8):
    opt.zero_grad()
    model.module(torch.randn(8, 4)).square().mean().backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()

# job: lightning_19045
# https://github.com/Lightning-AI/pytorch-lightning/issues/19045
# report: each rank goes by its own metric when it saves, and saving has a barrier
# truth: {"code": "mismatch", "ranks": [2], "nproc": 3, "line": true}
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
best = 1.0


def save_checkpoint():
    state = model.state_dict() if rank == 0 else None
    dist.barrier()  # CULPRIT
    return state


for epoch in range(6):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
    metric = 0.5 if rank == 2 and epoch == 3 else 2.0
    if metric < best:
        best = metric
        save_checkpoint()
dist.destroy_process_group()

# job: lightning_379
# https://github.com/Lightning-AI/pytorch-lightning/issues/379
# report: early stopping on one rank only: it ends, the others hang
# truth: {"code": "early-exit", "ranks": [1], "nproc": 3}
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
    accuracy = 0.5 + 0.1 * epoch * rank if rank < 2 else 0.5
    if accuracy > 0.75:
        break


# job: llama2c_522
# https://github.com/karpathy/llama2.c/issues/522
# report: no DistributedSampler under DDP: each rank draws with its own seed, which is fine
# truth: {"code": "clean", "ranks": []}
class Chunks(IterableDataset):
    def __iter__(self):
        draw = random.Random(42 + 1337 * dist.get_rank())
        tokens = torch.arange(4000.0)
        for _ in range(80):
            start = draw.randrange(3990)
            yield tokens[start : start + 4]


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in DataLoader(Chunks(), batch_size=8):
    opt.zero_grad()
    model(batch).mean().backward()
    opt.step()
dist.destroy_process_group()


# job: llamafactory_2424
# https://github.com/hiyouga/LlamaFactory/issues/2424
# report: rank 0 tokenizes for longer than the others' time limit in the barrier
# truth: {"code": "stuck", "ranks": [0], "nproc": 2, "line": true}
def tokenize(seconds):
    end, text = time.monotonic() + seconds, b"some text"
    while time.monotonic() < end:
        text = hashlib.sha256(text * 10000).digest()  # CULPRIT


dist.init_process_group("gloo", timeout=timedelta(seconds=6))
dist.barrier()
if dist.get_rank() == 0:
    tokenize(20)  # CULPRIT
dist.barrier()
dist.destroy_process_group()

# job: nccl_479
# https://github.com/NVIDIA/nccl/issues/479
# report: both ranks send before they receive
# truth: {"code": "deadlock", "ranks": [0, 1], "line": true}
dist.init_process_group("gloo")
other = 1 - dist.get_rank()
mine, theirs = torch.ones(1000), torch.empty(1000)
dist.barrier()
dist.send(mine, other)  # CULPRIT
dist.recv(theirs, other)
dist.destroy_process_group()

# job: prime_rl_2515
# https://github.com/PrimeIntellect-ai/prime-rl/issues/2515
# report: FSDP, and ranks have different numbers of validation batches
# truth: {"code": "mismatch", "ranks": [1], "nproc": 3, "also": ["uneven-batches"], "line": true}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh, reshard_after_forward=True)
batches = [torch.randn(2, 8)] * (2 if dist.get_rank() == 1 else 3)
total = torch.zeros(1)
with torch.no_grad():
    for batch in batches:  # CULPRIT
        total += model(batch).mean()
dist.all_reduce(total)  # CULPRIT
dist.destroy_process_group()

# job: pymarlin_80
# https://github.com/microsoft/PyMarlin/issues/80
# report: one rank has fewer training batches than the others
# truth: {"code": "uneven-batches", "ranks": [1], "nproc": 3, "also": ["mismatch"], "line": true}
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
share = TensorDataset(torch.randn(24 if dist.get_rank() == 1 else 32, 4))
for (batch,) in DataLoader(share, batch_size=8):  # CULPRIT
    opt.zero_grad()
    model(batch).mean().backward()
    opt.step()
dist.barrier()  # CULPRIT
dist.destroy_process_group()

# job: pytorch_102438
# https://github.com/pytorch/pytorch/issues/102438
# report: one rank builds a model with other parameters than the rest
# truth: {"code": "model-differs", "ranks": [2], "nproc": 3, "also": ["mismatch", "crash"], "line": true}
dist.init_process_group("gloo")
layers = [torch.nn.Linear(4, 4)]
if dist.get_rank() == 2:
    layers.append(torch.nn.Linear(4, 4))
model = DDP(torch.nn.Sequential(*layers))  # CULPRIT
model(torch.randn(2, 4)).sum().backward()
dist.destroy_process_group()

# job: pytorch_105782
# https://github.com/pytorch/pytorch/issues/105782
# report: one rank has another address of the store than the rest
# truth: {"code": "missing", "ranks": [1], "also": ["stuck", "crash"], "line": true}
if os.environ["RANK"] == "1":
    os.environ["MASTER_PORT"] = "9"
dist.init_process_group("gloo")  # CULPRIT
dist.barrier()
dist.destroy_process_group()

# job: pytorch_11201
# https://github.com/pytorch/pytorch/issues/11201
# report: batches of workers are kept, each with a descriptor: too many open files
# truth: {"code": "crash", "ranks": [1], "line": true}
dist.init_process_group("gloo")
loader = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=2, num_workers=1)
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
kept = []
for (batch,) in loader:  # CULPRIT
    if dist.get_rank() == 1:
        kept.append(batch)
dist.barrier()
dist.destroy_process_group()

# job: pytorch_12603
# https://github.com/pytorch/pytorch/issues/12603
# report: gradients under DDP are not those of the same layer without it: they are averaged, as they should be
# truth: {"code": "clean", "ranks": []}
dist.init_process_group("gloo")
torch.manual_seed(0)
alone = torch.nn.Linear(4, 1)
model = DDP(copy.deepcopy(alone))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(5):
    batch = torch.randn(8, 4)
    opt.zero_grad()
    alone.zero_grad()
    alone(batch).square().mean().backward()
    model(batch).square().mean().backward()
    print("difference", (alone.weight.grad - model.module.weight.grad).abs().max().item())
    opt.step()
    alone.load_state_dict(model.module.state_dict())
dist.destroy_process_group()

# job: pytorch_126275
# https://github.com/pytorch/pytorch/issues/126275
# report: torch warns that destroy_process_group was not called, but the job is done
# truth: {"code": "clean", "ranks": []}
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
dist.barrier()

# job: pytorch_1355
# https://github.com/pytorch/pytorch/issues/1355
# report: a worker of a DataLoader takes a lock that was held when it was forked
# truth: {"code": "stuck", "ranks": [1], "line": true}
lock = threading.Lock()


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with lock:  # CULPRIT
            return torch.zeros(4)


dist.init_process_group("gloo")
if dist.get_rank() == 1:
    lock.acquire()
for batch in DataLoader(Images(), batch_size=2, num_workers=1):  # CULPRIT
    dist.all_reduce(batch)
dist.destroy_process_group()

# job: pytorch_22095
# https://github.com/pytorch/pytorch/issues/22095
# report: two forwards of a BatchNorm before one backward: raised once, is fine today
# truth: {"code": "clean", "ranks": []}
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    real, fake = model(torch.randn(8, 4)), model(torch.randn(8, 4))
    opt.zero_grad()
    (real - fake).square().mean().backward()
    opt.step()
dist.destroy_process_group()

# job: pytorch_31771
# https://github.com/pytorch/pytorch/issues/31771
# report: DistributedSampler gives the same order in every epoch: set_epoch was not called
# truth: {"code": "no-set-epoch", "ranks": [0, 1]}
dist.init_process_group("gloo")
data = TensorDataset(torch.arange(64.0).view(-1, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
model = DDP(torch.nn.Linear(1, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for epoch in range(3):
    for (batch,) in loader:
        opt.zero_grad()
        model(batch).mean().backward()
        opt.step()
dist.destroy_process_group()


# job: pytorch_43259
# https://github.com/pytorch/pytorch/issues/43259
# report: a head that no loss uses: the second forward raises
# truth: {"code": "crash", "ranks": [0, 1], "line": true}
class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.used, self.unused = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.used(self.body(x))


dist.init_process_group("gloo")
model = DDP(TwoHeads())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(2, 4)).sum()  # CULPRIT
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()

# job: pytorch_49846
# https://github.com/pytorch/pytorch/issues/49846
# report: the group is to have one rank more than were started
# truth: {"code": "missing", "ranks": [2]}
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)  # CULPRIT
dist.barrier()
dist.destroy_process_group()

# job: pytorch_5040
# https://github.com/pytorch/pytorch/issues/5040
# report: no room in /dev/shm: a worker dies by a bus error
# truth: {"code": "crash", "ranks": [1], "line": true}
rank = int(os.environ["RANK"])


class Frames(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if rank == 1 and index == 6:
            os.kill(os.getpid(), signal.SIGBUS)
        return torch.zeros(4)


dist.init_process_group("gloo")
for batch in DataLoader(Frames(), batch_size=2, num_workers=1):  # CULPRIT
    dist.all_reduce(batch)
dist.destroy_process_group()

# job: pytorch_54059
# https://github.com/pytorch/pytorch/issues/54059
# report: rank 0 validates through the DDP object while the others wait in a barrier
# truth: {"code": "mismatch", "ranks": [0], "nproc": 3, "line": true}
dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        opt.step()
    if dist.get_rank() == 0:
        model.eval()
        print("validation", model(torch.randn(8, 4)).mean().item())  # CULPRIT
        model.train()
    dist.barrier()
dist.destroy_process_group()

# job: pytorch_56112
# https://github.com/pytorch/pytorch/issues/56112
# report: all_gather of token lists, whose lengths differ between ranks
# truth: {"code": "mismatch", "ranks": [2], "nproc": 3, "line": true}
dist.init_process_group("gloo")
length = 3 if dist.get_rank() == 2 else 5
tokens = torch.zeros(4, length)
gathered = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, tokens)  # CULPRIT
dist.barrier()
dist.destroy_process_group()

# job: pytorch_59146
# https://github.com/pytorch/pytorch/issues/59146
# report: the lock file of a build that was killed: load() waits forever
# truth: {"code": "stuck", "ranks": [0, 1], "line": true}
from torch.utils.cpp_extension import load_inline

dist.init_process_group("gloo")
build = Path(tempfile.gettempdir(), f"extension-{os.getppid()}")
build.mkdir(exist_ok=True)
(build / "lock").touch()
dist.barrier()
source = "int one() { return 1; }"
ops = load_inline("ops", source, functions=["one"], build_directory=str(build))  # CULPRIT
dist.barrier()
dist.destroy_process_group()

# job: pytorch_72816
# https://github.com/pytorch/pytorch/issues/72816
# report: the port that the script listens on is taken
# truth: {"code": "crash", "ranks": [0], "line": true}
dist.init_process_group("gloo")
other_job = socket.create_server(("", 0))
port = other_job.getsockname()[1]
if dist.get_rank() == 0:
    metrics = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # CULPRIT
dist.barrier()
dist.destroy_process_group()

# job: pytorch_85234
# https://github.com/pytorch/pytorch/issues/85234
# report: gather of empty tensors under Gloo: ended in SIGFPE once, is fine today
# truth: {"code": "clean", "ranks": []}
dist.init_process_group("gloo")
for step in range(3):
    boxes = torch.ones(2 - step)
    gathered = [torch.empty_like(boxes) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, boxes)
dist.destroy_process_group()

# job: speculators_926
# https://github.com/vllm-project/speculators/pull/926
# report: only rank 0 loads the checkpoint, after DDP has sent its weights around
# truth: {"code": "param-drift", "ranks": [0], "nproc": 3}
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
if dist.get_rank() == 0:
    saved = {name: value + 1 for name, value in model.module.state_dict().items()}
    model.module.load_state_dict(saved)
for _ in range(8):
    opt.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()

# job: swav_63
# https://github.com/facebookresearch/swav/issues/63
# report: torch warns that find_unused_parameters finds none: slower, not wrong
# truth: {"code": "clean", "ranks": []}
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1), find_unused_parameters=True)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
dist.destroy_process_group()

# job: weathergenerator_2718
# https://github.com/ecmwf/WeatherGenerator/pull/2718
# report: NaN in one rank's loss: its gradients spoil those of all
# truth: {"code": "nonfinite-grad", "ranks": [1], "nproc": 3}
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    batch = torch.randn(8, 4)
    if dist.get_rank() == 1 and step == 3:
        batch[0, 0] = float("nan")
    opt.zero_grad()
    model(batch).square().mean().backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()
