"""What ``tune`` predicts and what it measures: python -m tests.bench.predictions [--ranks N] [MODEL ...].

Five models whose layers sleep (a virtual accelerator), on ranks in network namespaces at 1 Gbit/s each, under six
settings: four bucket caps, accumulation, no reduction. All settings of a model are tried in turns in one job.
Needs root, iproute2 and two minutes a model. On a busy machine run it under ``chrt -r 10``.
A ratio below 1 says that the step was longer than predicted."""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.scenarios.hosts import Hosts, lent_hosts
from tests.scenarios.running import clean_environment, free_port

ROOT = Path(__file__).parents[2]
SMALL, LARGE = 1 / 2, 8
MODELS = {
    "even": (1.0,) * 16,
    "head": (SMALL,) * 16 + (LARGE,),
    "embedding": (LARGE,) + (SMALL,) * 16,
    "small": (1 / 16,) * 60,
    "bound": (2.0,) * 12,
}
"""MiB of gradients by layer, in the order of forward."""
COMPUTE_MS = 240.0
"""Of a step: a third in forward."""
SETTINGS = ("bucket_cap", "accumulate", "unreduced")
RATE = "1gbit"
CLOSE = 0.10
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A setting: the step as a ratio to that under the script's settings."""

    model: str
    setting: str
    predicted: float
    low: float
    high: float
    measured: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    chosen = parser.parse_args()
    tried: list[Tried] = []
    with lent_hosts(chosen.ranks) as hosts:
        for number in range(hosts.count):
            limit(hosts, number)
        for model in chosen.models:
            tried += tune(hosts, model, chosen.rounds)
    summarize(tried)


def limit(hosts: Hosts, number: int) -> None:
    """Let a host send at most at ``RATE``. The burst is several segments as the kernel hands them on."""
    where = ("tc", "-n", hosts.namespace(number), "qdisc", "add", "dev", "eth0", "root")
    subprocess.run([*where, "tbf", "rate", RATE, "burst", "256kb", "latency", "100ms"], check=True, timeout=20)


def tune(hosts: Hosts, model: str, rounds: int) -> list[Tried]:
    """Try the settings with a model, and print and return what came of them."""
    with tempfile.TemporaryDirectory() as folder:
        only = [word for name in SETTINGS for word in ("--only", name)]
        namespaces = ",".join(hosts.namespace(number) for number in range(hosts.count))
        command = [
            sys.executable, "-m", "ddpdoctor", "tune", *only, f"--rounds={rounds}", f"--report-dir={folder}/run",
            f"--nproc-per-node={hosts.count}", f"--master-port={free_port()}", "-m", "tests.bench.predictions", "rank",
            model, namespaces, f"{folder}/store",
        ]  # fmt: skip
        env = clean_environment(PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1")
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=900)
        report = Path(folder) / "run" / "report.json"
        result = json.loads(report.read_text())["data"]["tune"]["result"] if report.exists() else None
    if result is None:
        raise SystemExit(f"{model}: {done.stderr}")
    measured = [row for row in result["rows"] if row["measured"] and row["setting"] != "again"]
    tried = [_tried(model, row) for row in measured if row["predicted"]]
    print(f"{model}, {hosts.count} ranks: a step takes {result['step_ms']:.0f} ms, noise {_range(result['noise'])}")
    for one in tried:
        print(
            f"  {one.setting:28} predicted {one.predicted:.2f} ({one.low:.2f} to {one.high:.2f}), measured "
            f"{one.measured:.2f}: {one.predicted / one.measured:.2f}",
            flush=True,
        )
    refused = [str(row["setting"]) for row in measured if not row["predicted"]]
    print(*([f"  not predicted: {', '.join(refused)}"] if refused else []), sep="\n", flush=True)
    return tried


def _tried(model: str, row: dict[str, dict[str, float]]) -> Tried:
    span = row["predicted"]
    return Tried(
        model=model, setting=str(row["setting"]), predicted=span["ratio"], low=span["low"], high=span["high"],
        measured=row["measured"]["ratio"],
    )  # fmt: skip


def _range(span: dict[str, float]) -> str:
    return f"{span['ratio']:.2f} ({span['low']:.2f} to {span['high']:.2f})"


def summarize(tried: list[Tried]) -> None:
    """Print how well all settings were predicted."""
    ratios = sorted(one.predicted / one.measured for one in tried)
    close = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
    within = sum(one.low - 0.05 <= one.measured <= one.high + 0.05 for one in tried)
    print(
        f"{len(ratios)} settings, predicted / measured: median {statistics.median(ratios):.3f}, within 10 %: {close} "
        f"({close / len(ratios):.0%}), from {ratios[0]:.2f} to {ratios[-1]:.2f}; inside the range or within 5 % of the "
        f"step of it: {within}; load {os.getloadavg()[0]:.1f}"
    )


def train(model: str, namespaces: list[str], store: str) -> None:
    """Be a rank: enter its network, and train until the trial ends the job."""
    import torch
    import torch.distributed as dist

    rank, libc = int(os.environ["RANK"]), ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespaces[rank]}").open("rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    torch.set_num_threads(1)
    shared = dist.FileStore(store, len(namespaces))
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=len(namespaces))
    net = torch.nn.parallel.DistributedDataParallel(_model(MODELS[model]))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    while True:
        optimizer.zero_grad()
        net(torch.ones(8)).sum().backward()
        optimizer.step()


def _model(sizes_mib: tuple[float, ...]) -> "object":
    """Return layers of such sizes. Each sleeps its share of the step, twice as long in backward as in forward."""
    import time

    import torch

    seconds = COMPUTE_MS / 3 / len(sizes_mib) / 1000

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            time.sleep(2 * seconds)
            return gradient

    class Layer(torch.nn.Module):
        def __init__(self, mib):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(int(mib * 2**18)))

        def forward(self, x):
            return Sleep.apply(x + self.weight.mean())

    return torch.nn.Sequential(*map(Layer, sizes_mib))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        train(sys.argv[2], sys.argv[3].split(","), sys.argv[4])
    else:
        main()
