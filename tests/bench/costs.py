"""What ddpdoctor costs: python -m tests.bench.costs BENCH [--pairs N] [--steps N] [FLAGS OF wrap]; minutes each.

Two jobs or commands run in turn, A B B A. Printed is the median of the ratios of their times, or of the differences
where a unit stands there. Jobs are of two ranks under ``wrap``, over the same under torchrun, and train with DDP. With
two ranks on two cores whatever else runs comes between the ranks, and a step is as slow as the slower of both: as root,
run it under ``chrt -r 10``. ``consistency`` takes an hour and a half.
"""

import argparse
import compileall
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import ddpdoctor
from ddpdoctor.attach import look as looking
from tests.bench.pairs import PAIRS, compare, compare_added, measure, spread
from tests.scenarios.running import clean_environment, free_port, wait_for

PACKAGE = Path(ddpdoctor.__file__).parent
BIN = Path(sys.executable).parent
TORCHRUN, WRAP = ("torch.distributed.run",), ("ddpdoctor", "wrap")
STARTS = 5
"""Starts of Python that one measurement takes the fastest of."""
JOB = """
import json, os, resource, statistics, sys, time
import torch, torch.distributed as dist
asked = {"sleep_s": 0.0, "calls": 0, "look": True, "optimizer": "SGD", "auto": False, **json.loads(sys.argv[1])}
if "WATCH_DIR" in os.environ:
    import ddpdoctor
    ddpdoctor.watch(report_dir=os.environ["WATCH_DIR"]).start()
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":  # as the recorder makes torch safe
    dist.Logger.set_construction_data_and_log = lambda *unused: None
if not asked["look"]:
    for name, module in list(sys.modules.items()):
        if name.endswith("recorder.gradients"):
            module._begin = lambda *unused: None
width = asked["width"]
net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(asked["layers"])))
model = torch.nn.parallel.DistributedDataParallel(net)
opt = getattr(torch.optim, asked["optimizer"])(model.parameters(), lr=1e-4)
x, t = torch.randn(asked["rows"], width), torch.zeros(4)
times, compared = [], []
if asked["auto"]:
    schedule = next(module for name, module in list(sys.modules.items()) if name.endswith("recorder.schedule"))
for _ in range(asked["steps"]):
    began = time.perf_counter()
    opt.zero_grad(); loss = model(x).square().mean()
    if asked["sleep_s"]:
        time.sleep(asked["sleep_s"])
    loss.backward(); opt.step()
    times.append(time.perf_counter() - began)
    if asked["auto"]:
        compared.append((schedule.chosen().taken, schedule.chosen().spent_s))
for _ in range(asked["calls"]):
    dist.all_reduce(t)
last = times[len(times) // 4:]
resident = open("/proc/self/status").read().split("VmRSS:")[1].split()[0]
dist.barrier()
if dist.get_rank() == 0:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"median_s": statistics.median(last), "mean_s": statistics.fmean(last)}
    found |= {"times_s": times, "by_then": compared} if asked["auto"] else {}
    print(json.dumps({**found, "rss_mib": int(resident) / 1024, "peak_mib": peak / 1024}))
del model
dist.destroy_process_group()
"""
FIRST_LINE = """
import time
began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
import sys
with open(sys.argv[1], "a") as file:
    file.write("%d\\n" % began)
"""
SMALL = {"layers": 100, "width": 80, "rows": 32, "steps": 200}
"""A step of about ten milliseconds."""
SLEEPING = {**SMALL, "width": 8, "sleep_s": 0.01}
"""A host that waits for its GPU."""
LARGE = {"layers": 80, "width": 353, "rows": 64, "steps": 500, "optimizer": "Adam"}
"""10 M parameters in 160 tensors."""
CALLING = {"layers": 1, "width": 64, "rows": 16, "steps": 50}


class Asked(NamedTuple):
    """What the command line asks for."""

    pairs: int
    steps: dict[str, int]
    flags: tuple[str, ...]


class Trained(NamedTuple):
    """What one job took: of rank 0, and of a rank on disk."""

    median_s: float
    mean_s: float
    rss_mib: float
    peak_mib: float
    disk_mib: float
    written_bytes: int
    compared: int
    times_s: list[float] | None = None
    by_then: list[tuple[int, float]] | None = None
    """How many comparisons there had been after each step, and what they had taken by their own count."""


def train(job: dict[str, Any], *front: str, beside: Callable[[Path], AbstractContextManager[None]] | None = None,
          **env: str) -> Trained:  # fmt: skip
    """Run a job of two ranks, with something beside it. {folder} in a variable stands for the folder of the job."""
    with tempfile.TemporaryDirectory() as folder:
        script, run = Path(folder, "train.py"), Path(folder, "run")
        script.write_text(JOB)
        own = ["--report-dir", str(run)] if front[0] == "ddpdoctor" else []
        words = [*own, "--nproc-per-node=2", f"--master-port={free_port()}", str(script), json.dumps(job)]
        env = {name: value.format(folder=folder) for name, value in env.items()}
        process = subprocess.Popen(
            [sys.executable, "-m", *front, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=clean_environment(**env),
        )  # fmt: skip
        with beside(run) if beside else contextlib.nullcontext():
            stdout, stderr = process.communicate(timeout=3600)
        # Gloo may abort a rank at its exit, when all has been printed.
        line = next((one for one in stdout.splitlines() if one.startswith('{"median_s"')), None)
        if line is None:
            sys.exit(f"the job has failed:\n{stdout}\n{stderr}")
        blocks = sum(path.stat().st_blocks for path in run.rglob("*") if path.is_file())
        saved = json.loads(path.read_text()) if (path := run / "consistency.json").exists() else {}
        found = saved.get("consistency", saved)
        return Trained(
            **json.loads(line), disk_mib=blocks * 512 / 2**20 / 2, written_bytes=found.get("bytes_written", 0),
            compared=sum(stream["compared"] for stream in found.get("streams", ())),
        )  # fmt: skip


def seconds(*command: str, check: bool = True, **env: str) -> float:
    """Return the wall time of a command."""
    began = time.perf_counter()
    subprocess.run(command, check=check, stdout=subprocess.DEVNULL, env={**os.environ, **env})
    return time.perf_counter() - began


def start_s(**env: str) -> float:
    """Return the shortest wall time of some Pythons that do nothing."""
    return min(seconds(sys.executable, "-c", "pass", **env) for _ in range(STARTS))


def start(asked: Asked) -> None:
    """What the recorder adds to a Python that never imports torch, and how long ``ddpdoctor --help`` takes."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rings", "evidence"):
            (Path(folder) / name).mkdir()
        (Path(folder) / "control").write_bytes(bytes(4096))
        hook = {"PYTHONPATH": str(PACKAGE / "recorder" / "bootstrap"), "DDPDOCTOR_RUN": folder}
        rank = {**hook, "DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"}
        for name, env in (("the hook in a helper process adds", hook), ("in a rank that imports nothing", rank)):
            compare_added(name, lambda env=env: start_s(**env), start_s, unit="ms", scale=1e3, pairs=asked.pairs)
    compare(
        "ddpdoctor --help over python -c pass", lambda: seconds(str(BIN / "ddpdoctor"), "--help"), start_s, asked.pairs
    )


def first_line(asked: Asked) -> None:
    """How long it takes from the command to the script's first line. The first of the ranks to come writes the time."""

    def first_line_s(*command: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            script, result = Path(folder) / "script.py", Path(folder) / "times"
            script.write_text(FIRST_LINE)
            run = ["--report-dir", f"{folder}/run"] if command[0] == "ddpdoctor" else []
            rest = ["--nproc-per-node=2", f"--master-port={free_port()}", str(script), str(result)]
            words = [str(BIN / command[0]), *command[1:], *run, *rest]
            began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            subprocess.run(words, check=True, capture_output=True, env=clean_environment())
            return (min(map(int, result.read_text().split())) - began) / 1e9

    name = "to the first line under wrap over torchrun"
    compare(name, lambda: first_line_s(*WRAP), lambda: first_line_s("torchrun"), asked.pairs)


def check_env(asked: Asked) -> None:
    """How long ``check-env`` takes, over ``import torch``. What it found is not looked at here."""
    for more in ((), ("--no-torch",)):
        command = (str(BIN / "ddpdoctor"), "check-env", *more)
        compare(
            " ".join(("check-env", *more, "over import torch")), lambda command=command: seconds(*command, check=False),
            lambda: seconds(sys.executable, "-c", "import torch"), asked.pairs,
        )  # fmt: skip


def step(asked: Asked) -> None:
    """A step under ``wrap``; give it --debug-level OFF or DETAIL."""
    flags = asked.flags if "--debug-level" in asked.flags else ("--debug-level", "OFF", *asked.flags)
    level = flags[flags.index("--debug-level") + 1]
    job = SMALL | asked.steps
    compare(
        " ".join(("a step under wrap", *flags, "over torchrun's")), lambda: train(job, *WRAP, *flags).median_s,
        lambda: train(job, *TORCHRUN, TORCH_DISTRIBUTED_DEBUG=level).median_s, asked.pairs,
    )  # fmt: skip


def watch(asked: Asked) -> None:
    """A step of a job that calls ``ddpdoctor.watch``."""
    job = SMALL | asked.steps
    compare(
        "a step under ddpdoctor.watch over one without",
        lambda: train(job, *TORCHRUN, WATCH_DIR="{folder}/run").median_s,
        lambda: train(job, *TORCHRUN).median_s, asked.pairs,
    )  # fmt: skip


def speed(asked: Asked) -> None:
    """A step under ``wrap --speed``, which computes, or sleeps as a host does that waits for its GPU."""
    for what, model in (("computes", SMALL), ("sleeps", SLEEPING)):
        job = model | asked.steps
        compare(
            f"a step that {what}, under wrap --speed over torchrun's",
            lambda job=job: train(job, *WRAP, "--speed", *asked.flags).median_s,
            lambda job=job: train(job, *TORCHRUN).median_s, asked.pairs,
        )  # fmt: skip


def status(asked: Asked) -> None:
    """A step with a ``status --watch`` beside the job: the mean too, as few refreshes would not show in the median."""
    job = SMALL | {"steps": 1000} | asked.steps
    front = (*WRAP, "--debug-level", "OFF")
    jobs = [*measure(lambda: train(job, *front, beside=watched), lambda: train(job, *front), asked.pairs)]
    for name in ("mean", "median"):
        found = spread([getattr(a, f"{name}_s") / getattr(b, f"{name}_s") for a, b in jobs])
        print(f"{name} step with status --watch / without: {found.median:.3f} ({found.low:.3f} to {found.high:.3f})")


@contextlib.contextmanager
def watched(run: Path) -> Iterator[None]:
    """Run `status --watch` beside a job, from before its ranks start, and check that it has shown the steps."""
    assert wait_for((run / "run.json").exists)
    command = [sys.executable, "-m", "ddpdoctor", "status", str(run), "--watch"]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean_environment())
    try:
        yield
        assert shown.stdout is not None
        blocks = shown.stdout.read().count(b"  trains\n")
        _, ended, used = os.wait4(shown.pid, 0)
        shown.returncode = os.waitstatus_to_exitcode(ended)
        cost_ms = (used.ru_utime + used.ru_stime) * 1e3 / max(blocks, 1)
        print(f"{blocks} refreshes while it trained, {cost_ms:.0f} ms of a core each, imports included", flush=True)
    finally:
        shown.kill()


def memory(asked: Asked) -> None:
    """Resident memory of a rank that has trained, the ring's pages included; and disk after more and more calls."""
    front, job = (*WRAP, "--debug-level", "OFF"), {**CALLING, "calls": 1_000}
    compare_added(
        "memory of a rank under wrap, over torchrun's:", lambda: train(job, *front).rss_mib,
        lambda: train(job, *TORCHRUN).rss_mib, unit="MiB", scale=1, pairs=asked.pairs,
    )  # fmt: skip
    for calls in (1_000, 100_000):
        disk_mib = train({**CALLING, "calls": calls}, *front).disk_mib
        print(f"run folder after {calls} calls: {disk_mib:.2f} MiB a rank", flush=True)


def consistency(asked: Asked) -> None:
    """The mean step over that with ``--no-consistency``; then the same without the look at local gradients.

    The look has no switch: the script takes it out of the recorder. Memory is the peak of a rank.
    """
    front = (*WRAP, *asked.flags)
    for name, look in (("consistency on over off", True), ("the same without the look at local gradients", False)):
        job = LARGE | asked.steps | {"look": look}
        jobs = [
            *measure(
                lambda job=job: train(job, *front), lambda job=job: train(job, *front, "--no-consistency"), asked.pairs
            )
        ]
        found = spread([on.mean_s / off.mean_s for on, off in jobs])
        step_ms = statistics.median(off.mean_s for _, off in jobs) * 1e3
        more_mib, last = statistics.median(on.peak_mib - off.peak_mib for on, off in jobs), jobs[-1][0]
        print(
            f"{name}: {found.median:.4f} ({found.low:.4f} to {found.high:.4f}, {asked.pairs} pairs), a step of"
            f" {step_ms:.0f} ms, {more_mib:+.1f} MiB a rank, {last.written_bytes} bytes written,"
            f" {last.compared} points compared",
            flush=True,
        )


ATTACHED = """
import array, os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[2]
if sys.argv[1] == "hangs":
    dist.barrier()
    open(f"{folder}/at_{rank}", "w").close()
    if rank == 1:
        open(f"{folder}/release").read()
    dist.all_reduce(torch.ones(1))
else:
    some, end = torch.randn(256, 256), torch.zeros(1)
    with open(f"{folder}/at_{rank}", "wb", buffering=0) as steps:
        while not end:
            some = torch.nn.functional.normalize(some @ some)
            end += os.path.exists(f"{folder}/end")
            dist.all_reduce(end)
            steps.write(array.array("q", [time.monotonic_ns()]).tobytes())
dist.destroy_process_group()
"""


@contextlib.contextmanager
def attached(mode: str, ranks: int) -> Iterator[tuple[Path, Callable[[], tuple[int, int]]]]:
    """Run a job under torchrun, which must end well; yield its folder, and a look at it, which says when it was."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.mkfifo(folder / "release")
        (folder / "job.py").write_text(ATTACHED)
        words = [f"--nproc-per-node={ranks}", f"--master-port={free_port()}", str(folder / "job.py"), mode, name]
        process = subprocess.Popen([sys.executable, "-m", *TORCHRUN, *words], env=clean_environment())

        def look() -> tuple[int, int]:
            began = time.monotonic_ns()
            looking.attach(folder, process.pid)
            return began, time.monotonic_ns()

        try:
            wait_for(lambda: len(list(folder.glob("at_*"))) == ranks)
            yield folder, look
            if process.wait(100):
                sys.exit(f"the job that {mode} ended with status {process.returncode}")
        finally:
            process.kill()


def attach(asked: Asked) -> None:
    """The time to a saved folder of 8 ranks that hang, and the steps of two while ``attach`` looks, over the others."""
    with attached("hangs", 8) as (folder, look):
        began, ended = look()
        print(f"8 ranks: {(ended - began) / 1e9:.1f} s, of which {looking.GAP_S:.0f} s between the looks", flush=True)
        os.close(os.open(folder / "release", os.O_WRONLY))
    looked, alone = [], []
    with attached("moves", 2) as (folder, look):
        for _ in range(asked.pairs):
            began, ended = look()
            time.sleep((ended - began) / 1e9)
            looked.append((began, ended))
            alone.append((ended, time.monotonic_ns()))
        (folder / "end").touch()
        times = memoryview((folder / "at_0").read_bytes()).cast("q")
    steps = [
        [b - a for a, b in itertools.pairwise(times) if any(x <= a and b <= y for x, y in spans)]
        for spans in (looked, alone)
    ]
    for name, mean in (("median", statistics.median), ("mean", statistics.fmean)):
        print(f"step while looked at / without: {name} {mean(steps[0]) / mean(steps[1]):.3f} ({len(steps[0])} steps)")


BENCHES = {
    one.__name__: one for one in (start, first_line, check_env, step, watch, speed, status, memory, consistency, attach)
}


def main() -> None:
    """Run one bench. The package is compiled first, as pip does when it installs it."""
    about = "\n".join(f"{name}: {one.__doc__}" for name, one in BENCHES.items())
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int)
    given, flags = parser.parse_known_args()
    compileall.compile_dir(str(PACKAGE), quiet=1)
    BENCHES[given.bench](Asked(given.pairs, {"steps": given.steps} if given.steps else {}, tuple(flags)))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
