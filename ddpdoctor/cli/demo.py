"""``ddpdoctor demo``: runs a tiny real job with a seeded fault under ``wrap``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ddpdoctor.cli.options import LIST, Argument
from ddpdoctor.model.errors import ExitStatus, UserError

# The kinds of faults in the demo.
FAULTS = ("stuck", "crash", "killed", "early-exit", "mismatch", "exit-hang", "stopped", "input-bound")
RANKS = {"mismatch": 3}  # Ranks per fault. A majority needs three ranks. All other faults need only two.
SLOW = ("input-bound",)  # Faults that make a job slow. Their jobs run under ``wrap --speed``.
HANG_TIMEOUT_S = 5.0
# The script of a fault of one rank, filled in from ``SCRIPTS``.
TEMPLATE = '''\
"""{summary}"""

{imports}import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 20{shared}


{fault}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
{before}        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
{after}    del model  # a model that outlives its group can deadlock with a thread of the group
    dist.destroy_process_group(){last}


if __name__ == "__main__":
    main()
'''
EMPTY = dict.fromkeys(("imports", "shared", "before", "after", "last"), "")
SCRIPTS = {
    "stuck": {
        "summary": "Rank 1 waits for a reply that never comes, and rank 0 waits for rank 1 in backward.",
        "imports": "import threading\n\n",
        "shared": "\nreply = threading.Event()",
        "before": "        fetch_settings(step)\n",
        "fault": """def fetch_settings(step):
    if dist.get_rank() == 1 and step == 5:
        reply.wait()  # the fault: it is never set""",
    },
    "crash": {
        "summary": "Rank 1 raises an exception on a bad sample, and rank 0 loses its peer.",
        "before": "        inputs[0, 0] = parse_sample(step)\n",
        "fault": """def parse_sample(step):
    text = "n/a" if dist.get_rank() == 1 and step == 5 else str(step)
    return float(text)  # the fault: "n/a" is not a number""",
    },
    "killed": {
        "summary": "Rank 1 is killed by SIGKILL in the middle of training, as by the kernel when memory runs out.",
        "imports": "import os\nimport signal\n\n",
        "before": "        load_batch(step)\n",
        "fault": """def load_batch(step):
    if dist.get_rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)  # the fault""",
    },
    "early-exit": {
        "summary": "Rank 1 exits with status 0 while rank 0 keeps training and waits for it.",
        "imports": "import sys\n\n",
        "before": "        stop_early(step)\n",
        "fault": """def stop_early(step):
    if dist.get_rank() == 1 and step == 5:
        sys.exit(0)  # the fault: rank 0 does not know""",
    },
    "mismatch": {
        "summary": "Rank 2 calls broadcast where ranks 0 and 1 call all_reduce.",
        "after": "        share_loss(loss, step)\n",
        "fault": """def share_loss(loss, step):
    value = loss.detach().clone()
    if dist.get_rank() == 2 and step == 5:
        dist.broadcast(value, src=2)  # the fault: the others average
    else:
        dist.all_reduce(value)
    return value / dist.get_world_size()""",
    },
    "exit-hang": {
        "summary": "Both ranks finish training, but rank 1 does not exit: a non-daemon thread waits forever.",
        "imports": "import threading\n\n",
        "shared": "\nmore_work = threading.Event()",
        "after": """\
    if dist.get_rank() == 1:
        threading.Thread(target=upload_metrics, name="upload").start()
""",
        "fault": """def upload_metrics():
    more_work.wait()  # the fault: it is never set""",
    },
    "stopped": {
        "summary": "Rank 1 is frozen by SIGSTOP, as by a debugger, and rank 0 waits for it in backward.",
        "imports": "import os\nimport signal\n\n",
        "before": "        load_batch(step)\n",
        "fault": """def load_batch(step):
    if dist.get_rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGSTOP)  # the fault""",
    },
}
INPUT_BOUND = '''\
"""Both ranks read samples one by one from a slow disk, and the training step waits for them."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 2


class Images(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.003)  # the fault: a slow disk, and no loader worker reads ahead
        return torch.randn(256), index % 10


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = Images()
    loader = DataLoader(images, batch_size=8, sampler=DistributedSampler(images))
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    del model  # a model that outlives its group can deadlock with a thread of the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Run a small job with a fault and diagnose it.

    Takes less than 30 s. The exit status is 0 if the diagnosis names the fault, else 1.
    """

    fault: Annotated[str, Argument(metavar="FAULT", help="The fault; --list names them.")] = FAULTS[0]
    show_list: Annotated[bool, LIST.but(help="List the faults.")] = False


def run(options: Options) -> int:
    from ddpdoctor.cli.output import say, write

    if options.show_list:
        width = max(map(len, FAULTS))
        write(sys.stdout, "".join(f"{name:<{width}}  {describe(name)}\n" for name in FAULTS))
        return ExitStatus.OK
    if options.fault not in FAULTS:
        raise UserError(f"unknown fault: {options.fault}", help=f"Faults: {', '.join(FAULTS)}.")
    import socket
    import tempfile

    from ddpdoctor.cli.running import outcome_report, run_and_show
    from ddpdoctor.cli.wrap import Options as Wrapped
    from ddpdoctor.cli.wrap import prepare
    from ddpdoctor.launch.command_line import SplitCommand

    fault, ranks = options.fault, RANKS.get(options.fault, 2)
    say(sys.stderr, f"running a job of {ranks} ranks with a seeded fault: {describe(fault)}")
    try:
        folder = Path(tempfile.mkdtemp(prefix="ddpdoctor-demo-"))
    except OSError as error:
        what = f"cannot make a temporary folder: {error.strerror}"
        raise UserError(what, help="Nothing was started. Set TMPDIR to another folder.") from error
    script = folder / f"{fault.replace('-', '_')}.py"
    script.write_text(read_script(fault), encoding="utf-8")
    with socket.socket() as free:  # so that the demo does not meet another job on torchrun's default port 29500
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    split = SplitCommand(script=str(script), torchrun=(f"--nproc-per-node={ranks}", f"--master-port={port}"))
    place, is_slow = folder / "report", fault in SLOW
    wrapped = Wrapped(split=split, hang_timeout_s=HANG_TIMEOUT_S, on_hang="kill", report_dir=place, speed=is_slow)
    prepared = prepare(wrapped, os.environ, command=("ddpdoctor", "demo", fault))
    prepared = prepared if wrapped.speed else replace(prepared, debug_level="AUTO")
    verdict = outcome_report(run_and_show(prepared)).verdict
    say(sys.stderr, f"the script and the report are in {prepared.report_dir.parent}")
    if verdict is not None and verdict.kind == fault:
        return ExitStatus.OK
    found = "no verdict" if verdict is None else f"the verdict {verdict.kind}"
    say(sys.stderr, f"the fault was {fault}, but the diagnosis is {found}")
    return ExitStatus.FOUND


def read_script(fault: str) -> str:
    return INPUT_BOUND if fault == "input-bound" else TEMPLATE.format(**EMPTY | SCRIPTS[fault])


def describe(fault: str) -> str:
    return read_script(fault).split('"""')[1].splitlines()[0]
