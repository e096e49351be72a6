"""Trainings and measurements on a device: each function is a job, and its name follows the file of its result."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from place import BACKEND, DEVICE, DRY, SEEDED, STANDIN, join, leave, settle


def trains():
    """DDP trains a small network with batch norm until its loss has fallen. Nothing is wrong.

    With DROPOUT the network also drops that part of its units, and with SEEDED=1 all ranks drop the same ones.
    """
    rank = join()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )
    if "DROPOUT" in os.environ:
        net.insert(3, torch.nn.Dropout(float(os.environ["DROPOUT"])))
    model = DDP(net.to(DEVICE))
    if not SEEDED:
        torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    given = torch.randn(32, 16, generator=generator).to(DEVICE)
    labels = torch.randint(4, (32,), generator=generator).to(DEVICE)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(given), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        leave({"losses": losses})
    dist.barrier()
    dist.destroy_process_group()


def gradients():
    """DDP with both ranks on one GPU. With SEEDED=1 a gradient of rank 1 is NaN in the 7th backward.

    OVER is the backend. With VIEWS=1 gradients are views of DDP's buckets, which are reduced in place.
    """
    rank = join(os.environ.get("OVER", BACKEND))
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(16, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4)).to(DEVICE)
    seen = 0

    def spoil(gradient):
        nonlocal seen
        seen += 1
        return gradient * float("nan") if SEEDED and rank == 1 and seen == 7 else gradient

    net[2].weight.register_hook(spoil)
    model = DDP(net, gradient_as_bucket_view=os.environ.get("VIEWS") == "1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 16, device=DEVICE)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def steps_measured():
    """300 steps of DDP. The GPU has much to do and the host little, or with SEEDED=1 the other way round."""
    STEPS = 300
    IS_SMALL = DRY or STANDIN is not None

    def make_net():
        if SEEDED:
            return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40 if DRY else 400))), 8
        width = 64 if IS_SMALL else 8192
        return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))), width

    join()
    torch.manual_seed(0)
    net, width = make_net()
    model = DDP(net.to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    given = torch.randn(64 if SEEDED or IS_SMALL else 8192, width, device=DEVICE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def capture_async_allreduce():
    """An asynchronous reduction in a CUDA graph, while the work of one before the capture was never waited for."""
    join()
    value = torch.ones(1024, device=DEVICE)
    before = dist.all_reduce(torch.ones(4, device=DEVICE), async_op=True)
    dist.all_reduce(value, async_op=True).wait()  # connects
    settle()

    def reduce_and_add():
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        value.add_(1)

    value.zero_()
    if DRY:
        for _ in range(10):
            reduce_and_add()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            reduce_and_add()
        for _ in range(10):
            graph.replay()
    settle()
    leave({"value": value[0].item(), "right": bool((value == 10).all())})
    before.wait()
    if not DRY:
        graph.reset()
    dist.destroy_process_group()


def ddp_whole_capture():
    """Forward, backward, reductions and step of DDP in one CUDA graph, after the 11 warm-ups that torch asks for."""
    WARM_UPS, REPLAYS = 11, 10
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # torch's notes on graphs ask for it
    rank = join()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(DEVICE)
    given = torch.randn(16, 64, device=DEVICE)
    stream = None if DRY else torch.cuda.Stream()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = DDP(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = model(given).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        losses = [step().item() for _ in range(WARM_UPS)]
    settle()
    if DRY:
        losses += [step().item() for _ in range(REPLAYS)]
    else:
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(REPLAYS):
            graph.replay()
            losses.append(loss.item())
    settle()
    weights = net[0].weight.detach().clone()
    dist.all_reduce(weights)
    same = bool(torch.allclose(weights / 2, net[0].weight))
    if rank == 0:
        leave({"losses": losses, "same_weights": same})
    dist.barrier()
    settle()
    if not DRY:
        graph.reset()  # NCCL waits for the graphs that hold its collectives
    dist.destroy_process_group()


def event_stream():
    """Times a kernel of known length with the bench's own clocks, on the current stream and on one of its own."""
    from ddpdoctor.probes.bandwidth.collectives import RankGroup, Tracker
    from ddpdoctor.probes.bandwidth.timing import time_batches, time_calls

    join(at_once=True)
    group = RankGroup(handle=None, ranks=(0,), device=torch.device(DEVICE), backend=BACKEND, tracker=Tracker())
    side = None if DRY else torch.cuda.Stream()

    def here(_async_op):
        time.sleep(0.01) if DRY else torch.cuda._sleep(20_000_000)  # about 10 ms of an H200

    def beside(_async_op):
        if DRY:
            time.sleep(0.01)
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # about 10 ms of an H200
        torch.cuda.current_stream().wait_stream(side)

    found = {}
    for name, call in {"here": here, "beside": beside}.items():
        calls = iter([call] * 100)
        time_calls(group, "all_reduce", calls, 3)
        spans = {
            "calls": time_calls(group, "all_reduce", calls, 10),
            "batches": time_batches(group, "all_reduce", calls, 3, 10),
        }
        found[name] = {kind: {"device_us": one.times_us, "host_us": one.host_us} for kind, one in spans.items()}
    leave(found)
    torch.distributed.destroy_process_group()


def maxima_dtypes():
    """The greatest magnitudes of tensors of each dtype, as the recorder has them sent to the host, in one batch."""
    from ddpdoctor.recorder.gradient_checks import Maxima
    from ddpdoctor.recorder.gradient_checks import is_plain
    from ddpdoctor.recorder.gradient_checks import samples_of

    DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
    CONTENTS = {
        "finite": [-3.0, 2.0],
        "nan": [1.0, float("nan")],
        "inf": [1.0, float("-inf")],
        "empty": [],
        "huge": None,
    }
    LIMIT_S = 30

    def tensor_of(dtype, contents):
        if contents is None:
            largest = torch.finfo(dtype).max
            return torch.full((70_000,), largest, dtype=dtype, device=DEVICE)
        return torch.tensor(contents, dtype=dtype, device=DEVICE)

    kinds = [(dtype, name) for dtype in DTYPES for name in CONTENTS]
    tensors = [tensor_of(dtype, CONTENTS[name]) for dtype, name in kinds]
    assert all(map(is_plain, tensors))
    maxima = Maxima(samples_of(tensors))
    limit = time.monotonic() + LIMIT_S
    while not maxima.have_come() and time.monotonic() < limit:
        time.sleep(0.01)
    values = [str(value) for value in maxima.values()]
    leave({"%s %s" % (str(dtype)[6:], name): value for (dtype, name), value in zip(kinds, values)})


if __name__ == "__main__":
    globals()[sys.argv[2]]()
