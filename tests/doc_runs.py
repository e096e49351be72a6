"""Runs the commands of which pages show the output, for real, and writes the blocks of the pages anew.

Commands that need several ranks, hosts or minutes are recorded: the report of a real run is kept in
tests/data/pages/NAME.json.xz, and the block is how a terminal shows it.

python -m tests.doc_runs                   write all blocks anew: run what is quick, draw what is recorded
python -m tests.doc_runs NAME [FOLDER]     run a recorded command again, in a folder that has what it reads
"""

import lzma
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import forking
from tests.doc_pages import DOCS, FENCE, ROOT, Block, blocks, command_lines

FILES = ROOT / "tests" / "data" / "pages"
"""Recorded reports, and files that commands on pages read."""
SAVED_RUNS = ROOT / "tests" / "data" / "runs"
STEP = re.compile(
    r"^<!-- (?P<how>run beside|run|output: (?P<name>[\w-]+)) -->\n```(?P<kind>\w+)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FIRST_JOB = DOCS / "first-job"
"""Pages whose blocks run real jobs, one after the other in one folder, with any program."""
WIDTH = 110
"""The width of the terminal in which recorded runs are shown."""
OF_DEMO = frozenset({"demo", "demo-crash", "demo-input-bound"})
"""Held by tests/scenarios/test_demo.py, which runs these jobs anyway."""
LAUNCHED = re.compile(r"^(DDPDOCTOR|SLURM|PET|TORCHELASTIC|NCCL|GLOO|MASTER)_|^(RANK|WORLD_SIZE|LOCAL_RANK)$")


def is_recorded(name: str) -> bool:
    """Tell whether a block is drawn from the report of a recorded run."""
    return (FILES / f"{name}.json.xz").exists()


def recorded(name: str) -> str:
    """Return the report of a recorded run, as JSON."""
    return lzma.decompress((FILES / f"{name}.json.xz").read_bytes()).decode()


def draw(report: str) -> str:
    """Return a report as a terminal shows it."""
    from ddpdoctor.cli.report import read_run
    from ddpdoctor.report.text import render_text

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "report.json").write_text(report)
        return render_text(read_run(Path(folder)), width=WIDTH, color=False, run_dir=None)


def in_a_process(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not LAUNCHED.search(name)}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return forking.run("-m", "ddpdoctor", *words, cwd=folder, env={**clean, **env})


def print_for(block: Block, folder: Path, run: Callable[..., subprocess.CompletedProcess[str]] = in_a_process) -> str:
    """Return what the commands of a block print, in an empty folder that gets the files they read."""
    for path in FILES.iterdir():
        if not path.name.endswith(".json.xz"):
            shutil.copy(path, folder)
    if block.name in PREPARED:
        PREPARED[block.name](folder)
    printed, env = "", {}
    for command in block.commands:
        program, *words = shlex.split(command)
        if program == "export":
            env.update(word.split("=", 1) for word in words)
            continue
        assert program == "ddpdoctor", command
        done = run(folder, *words, **env)
        printed += done.stdout or done.stderr
    return printed


def print_first_job(page: Path, folder: Path) -> dict[str, str]:
    """Return what each block of a page prints in a terminal, in a folder that gets the scripts.

    A block marked ``run`` is run too, and one marked ``run beside`` goes on while the next one runs.
    """
    for script in FIRST_JOB.glob("*.py"):
        shutil.copy(script, folder)
    clean = {name: value for name, value in os.environ.items() if not LAUNCHED.search(name)}
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**clean, "PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with socket.socket() as free:  # pages that are followed side by side must not meet at torchrun's default port
        free.bind(("127.0.0.1", 0))
        env["PET_MASTER_PORT"] = str(free.getsockname()[1])
    printed, beside = {}, ""
    for match in STEP.finditer(page.read_text()):
        commands = "\n".join(line.removeprefix("$ ") for line in command_lines(match))
        if match["how"] == "run beside":
            beside = f"({commands}) >/dev/null 2>&1 &\n"
        elif not is_recorded(match["name"] or ""):
            done = subprocess.run(
                ["bash", "-c", f"{beside}{commands}\nwait"], cwd=folder, env=env, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=250, check=False,
            )  # fmt: skip
            beside, printed[match["name"]] = "", done.stdout
    return printed


def unpack_drift(folder: Path) -> None:
    with tarfile.open(SAVED_RUNS / "drift.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def unpack_compared(folder: Path) -> None:
    with tarfile.open(FILES / "compare.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def make_checkpoint() -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def damage_checkpoint(folder: Path) -> None:
    import torch

    torch.save(make_checkpoint(), folder / "flip.pt")
    content = bytearray((folder / "flip.pt").read_bytes())
    weight = make_checkpoint()["model"]["2.weight"].numpy().tobytes()
    content[content.index(weight)] ^= 1
    (folder / "flip.pt").write_bytes(content)


def cut_checkpoint(folder: Path) -> None:
    import torch

    torch.save(make_checkpoint(), folder / "cut.pt")
    content = (folder / "cut.pt").read_bytes()
    (folder / "cut.pt").write_bytes(content[: len(content) // 2])


def save_the_wrapped_model(folder: Path) -> None:
    import torch

    torch.save({f"module.{name}": value for name, value in make_checkpoint()["model"].items()}, folder / "ddp.pt")
    (folder / "train.py").write_text(
        "import torch\n\n\ndef build_model():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))\n"
    )


def save_two_ranks(folder: Path) -> None:
    import torch

    state = make_checkpoint()
    torch.save(state, folder / "ckpt_rank0.pt")
    state["model"]["2.bias"][1] += 1e-4
    state["optimizer"]["param_groups"][0]["lr"] = 0.01
    torch.save(state, folder / "ckpt_rank1.pt")


PREPARED = {
    "drift": unpack_drift,
    "compare": unpack_compared,
    "checkpoint-damaged": damage_checkpoint,
    "checkpoint-cut": cut_checkpoint,
    "checkpoint-prefix": save_the_wrapped_model,
    "check-consistency-diff": save_two_ranks,
}


def main(words: list[str]) -> None:
    """Write the blocks anew."""
    if words:
        (wanted,) = [one for one in blocks() if one.name == words[0]]
        record(wanted, Path(words[1]) if len(words) > 1 else DOCS / "examples")
    for page in sorted(FIRST_JOB.glob("[1-9]*.md")):
        with tempfile.TemporaryDirectory() as folder:
            printed = print_first_job(page, Path(folder))
        for block in blocks():
            if block.page == page and block.name in printed and not re.search(r"^ *\.\.\.", block.shown, re.MULTILINE):
                write(block, printed[block.name])
    for block in blocks():
        if block.page.parent == FIRST_JOB and not is_recorded(block.name):
            continue
        if block.name in OF_DEMO or re.search(r"^ *\.\.\.", block.shown, re.MULTILINE):
            sys.stdout.write(f"left to you: {block.name} in {block.page.name}\n")
        elif is_recorded(block.name):
            write(block, draw(recorded(block.name)))
        else:
            with tempfile.TemporaryDirectory() as folder:
                write(block, print_for(block, Path(folder)))


def record(block: Block, folder: Path) -> None:
    """Run the last command of a block for real, and keep its report."""
    with tempfile.TemporaryDirectory() as kept:
        words = [*shlex.split(block.commands[-1]), "--report-dir", kept]
        programs = Path(sys.executable).parent
        env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
        report = Path(kept, "report.json")
        if not report.exists():
            sys.exit(done.stdout + done.stderr)
        text = report.read_text().replace(f"{folder.resolve()}/", "").replace(kept, "run")
    text = text.replace(f"{programs}/", "/home/ada/venv/bin/").replace(f"{ROOT}/", "").replace(sys.base_prefix, "/usr")
    (FILES / f"{block.name}.json.xz").write_bytes(lzma.compress(text.encode()))


def write(block: Block, printed: str) -> None:
    """Put what was printed into the block, below its commands."""
    text = block.page.read_text()
    match = next(match for match in FENCE.finditer(text) if match["name"] == block.name)
    commands = re.match(r"(?:\$ .*\n(?:    .*\n)*)*", match["body"])
    start = match.start("body") + (commands.end() if commands else 0)
    block.page.write_text(text[:start] + printed.strip("\n") + "\n" + text[match.end("body") :])


if __name__ == "__main__":
    main(sys.argv[1:])
