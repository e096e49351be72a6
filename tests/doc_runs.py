"""Runs the commands of which pages show the output, for real, and writes the blocks of the pages anew.

Commands that need several ranks, hosts or minutes are recorded: the report of a real run is kept in
tests/data/pages/NAME.json.xz, and the block is how a terminal shows it. A job of hours is drawn from made-up facts.

python -m tests.doc_runs                   write all blocks and pictures: run jobs, draw what is recorded (10 minutes)
python -m tests.doc_runs --quick           write the pictures, and all blocks that need no job
python -m tests.doc_runs PAGE.md ...       write the blocks of these pages
python -m tests.doc_runs NAME [FOLDER]     run a recorded command again, in a folder that has what it reads

A block in which only numbers and folders differ stays. So do lines that begin with ``...``, and what they leave out.
"""

import difflib
import json
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
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from tests import forking
from tests.doc_pages import (
    DOCS,
    FENCE,
    ROOT,
    Block,
    blocks,
    command_lines,
    differs,
    is_gap,
    load_script,
    mask_all,
    mask_places,
    split_body,
)

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


def is_drawn(name: str) -> bool:
    """Tell whether a block is drawn, from the report of a recorded run or from made-up facts."""
    return name in DRAWN or (FILES / f"{name}.json.xz").exists()


def drawn(name: str) -> str:
    """Return what a terminal shows of a recorded run, or of made-up facts."""
    return DRAWN[name]() if name in DRAWN else draw(recorded(name))


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


def print_for(
    block: Block, folder: Path, run: Callable[..., subprocess.CompletedProcess[str]] = in_a_process, **env: str
) -> str:
    """Return what the commands of a block print, in an empty folder that gets the files they read."""
    for path in FILES.iterdir():
        if not path.name.endswith(".json.xz"):
            shutil.copy(path, folder)
    if block.name in PREPARED:
        PREPARED[block.name](folder)
    printed = ""
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
        elif not is_drawn(match["name"] or ""):
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


def draw_history() -> str:
    """Draw a job of three hours that a scheduler started four times."""
    from ddpdoctor.diagnose.live import sum_up
    from ddpdoctor.model.findings import JobStatus
    from ddpdoctor.model.live import Blamed, PassSeen, Start
    from ddpdoctor.report.verbs.live import render_history

    morning = datetime(2026, 3, 14, 10, tzinfo=timezone.utc)

    def start(at_min: int, **more: Any) -> Start:
        began = morning + timedelta(minutes=at_min)
        seen = began + timedelta(minutes=41)
        more = {"first_step_at": began + timedelta(minutes=2), "last_progress_at": seen, "ended_at": seen} | more
        return Start(run="runs/1", attempt=0, began_at=began, hosts=8, **more)

    on_node7 = (Blamed(rank=3, host="node7"),)
    killed: dict[str, Any] = {"code": "DD605", "kind": "killed", "summary": "the kernel killed it: out of memory"}
    stuck: dict[str, Any] = {"code": "DD601", "kind": "stuck", "summary": "it waits in read_shard (data.py:48)"}
    whole = {"steps": 1200, "passes": (PassSeen(epoch=0, steps=1200),), "first_epoch": 0, "blamed": on_node7}
    starts = [
        start(0, status=JobStatus.FAILED, **whole, **killed),
        start(50, status=JobStatus.FAILED, **whole, **killed),
        start(100, status=JobStatus.HUNG, saved_step=1000, **whole, **stuck),
        start(180, status=JobStatus.INTERRUPTED, steps=7),
    ]
    job = sum_up(("ddpdoctor", "wrap", "train.py"), starts, morning + timedelta(hours=4))
    return render_history([job], (), width=80, color=False)


def draw_status() -> str:
    """Draw a job of eight ranks that wait for one."""
    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.live import JobNow, Liveness, RankNow, ReplicasNow, WaitNow
    from ddpdoctor.report.verbs.live import render_status

    def rank(number: int) -> RankNow:
        blamed = number == 1
        state, line, function = ("in the script", 6, "fetch_settings") if blamed else ("in backward", 12, "main")
        return RankNow(
            rank=number, host="node1", pid=4000 + number, lives=True, trains=False, state=state, since_s=26.0,
            where=Place(rank=number, file="train.py", line=line, function=function), step=300, step_ms=38.7,
            waits_share=0.41 if blamed else 0.40, epoch=0, batch=0, memory_bytes=311 * 2**20,
        )  # fmt: skip

    status = JobNow(
        run="ddpdoctor-report/20261124-131805-train", state=Liveness.RUNNING, host="node1",
        started_at="2026-11-24T13:18:05.000+00:00", running_s=95.0, exit_status=None, attempt=0, world_size=8,
        ranks=tuple(map(rank, range(8))), waits=(WaitNow(ranks=(0, *range(2, 8)), call="backward", since_s=26.0),),
        waited_for=(1,), replicas=ReplicasNow(equal_up_to=300, at="optimizer step", compared=12),
        unseen=(), reported="",
    )  # fmt: skip
    return render_status(status, width=WIDTH, color=False)


def read_gallery(name: str) -> dict[str, Any]:
    """Return a report of the gallery, as JSON is read."""
    from ddpdoctor.report.formats import render_json

    return dict(json.loads(render_json(load_script("gallery").read_reports()[name])))


def draw_part(report: dict[str, Any], start: str) -> str:
    """Draw the part of a report that begins with these words."""
    return next(part for part in draw(json.dumps(report)).split("\n\n") if part.lstrip().startswith(start))


def draw_gains() -> str:
    """Draw three predictions."""
    report = read_gallery("slow-rank")
    speed = report["data"]["speed"]
    _, accumulated, bf16, bucket = speed["predictions"]
    bucket |= {"change": "bucket_cap_mb=1", "ratio": 0.69, "low": 0.69, "high": 0.69}
    accumulated |= {"ratio": 0.75, "low": 0.75, "high": 0.75}
    bf16 |= {"ratio": 0.91, "low": 0.83}
    speed["predictions"] = [bucket, accumulated, bf16]
    return draw_part(report, "what a change would gain")


def draw_network() -> str:
    """Draw what a network could carry, by a curve of allreduce-bench."""
    from ddpdoctor.diagnose.bandwidth import read_baseline
    from ddpdoctor.diagnose.job import predict_by_curve, rebuild_report
    from ddpdoctor.report.formats import parse_report, render_json
    from ddpdoctor.report.text import render_text

    (path,) = (FILES.parent / "kept").glob("speed-communication-wide.2.*")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as packed:
        packed.extractall(folder, filter="data")
        curve = read_baseline(parse_report(recorded("allreduce-bench")), "bench", "--curve")
        report = predict_by_curve(rebuild_report(Path(folder)), Path(folder), curve)
    lines = render_text(parse_report(render_json(report)), width=None, color=False, run_dir=None).splitlines()
    return next(line.strip() for line in lines if line.strip().startswith("the network could carry"))


def draw_replicas() -> str:
    """Show what ``check_consistency`` returns for equal replicas, and the error that it raises for others."""
    from ddpdoctor.model.consistency import ConsistencyError, ConsistencyResult, TensorDifference

    def differs_in(what: str, name: str, *values: str) -> TensorDifference:
        return TensorDifference(what=what, name=name, part="", sides=((0, 1), (2,)), values=values or ("", ""))

    parameters = (differs_in("parameter", f"{layer}.{name}") for layer in (0, 2) for name in ("weight", "bias"))
    differences = (differs_in("optimizer setting", "lr", "0.1", "0.01"), *parameters)
    of_all: dict[str, Any] = {"ranks": (0, 1, 2), "compared": 27, "left_out": ()}
    equal = ConsistencyResult(equal=True, differences=(), **of_all)
    error = ConsistencyError(ConsistencyResult(equal=False, differences=differences, **of_all))
    return f"{equal.text}\n{type(error).__module__}.{type(error).__name__}: {error}"


DRAWN: dict[str, Callable[[], str]] = {
    "history": draw_history,
    "status": draw_status,
    "timeline": lambda: draw_part(read_gallery("hang"), "DD601 stuck"),
    "gains": draw_gains,
    "network": draw_network,
    "replicas": draw_replicas,
}
"""Blocks that show a part of a report, or a job of hours."""
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
    pages = {block.page for block in blocks()}
    wanted = {page for page in pages if page.resolve() in {Path(word).resolve() for word in words}}
    quick = words == ["--quick"]
    if words and not wanted and not quick:
        (again,) = {block.name: block for block in blocks() if block.name == words[0]}.values()
        record(again, Path(words[1]) if len(words) > 1 else DOCS / "examples")
    for page in sorted((wanted or pages) & set(FIRST_JOB.glob("[1-9]*.md")) if not quick else ()):
        with tempfile.TemporaryDirectory() as folder:
            printed = print_first_job(page, Path(folder))
        for block in blocks():
            if block.page == page and block.name in printed:
                write(block, printed[block.name])
    printed_once: dict[str, str] = {}
    for block in blocks():
        if block.page not in (wanted or pages):
            continue
        if is_drawn(block.name):
            write(block, drawn(block.name))
        elif block.page.parent != FIRST_JOB and not (quick and block.name in OF_DEMO):
            if block.name not in printed_once:
                with tempfile.TemporaryDirectory() as folder:
                    printed_once[block.name] = print_for(block, Path(folder), TMPDIR=folder)
            write(block, printed_once[block.name])
    if not wanted:
        load_script("gallery").main(["--pictures"])


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
    """Put what was printed into the block, below its commands, if more than numbers and folders differ."""
    if not differs(block.shown, printed, mask_places if is_drawn(block.name) else None):
        return
    text = block.page.read_text()
    match = next(match for match in FENCE.finditer(text) if match["name"] == block.name)
    commands = re.match(r"(?:\$ .*\n(?:    .*\n)*)*", match["body"])
    start = match.start("body") + (commands.end() if commands else 0)
    shown = with_gaps(split_body(match["body"])["shown"].splitlines(), printed.strip("\n").splitlines())
    if differs(shown, printed):
        sys.stdout.write(f"left to you: {block.name} in {block.page.name}\n")
    else:
        block.page.write_text(text[:start] + shown + "\n" + text[match.end("body") :])


def with_gaps(shown: Sequence[str], printed: Sequence[str]) -> str:
    """Return what was printed, without the lines for which the block shows a gap."""
    if not any(map(is_gap, shown)):
        return "\n".join(printed)
    lines: list[str] = []
    kept = difflib.SequenceMatcher(None, [*map(mask_all, shown)], [*map(mask_all, printed)], autojunk=False)
    for _, first, last, new_first, new_last in kept.get_opcodes():
        old, new = shown[first:last], printed[new_first:new_last]
        gaps = [at for at, line in enumerate(old) if is_gap(line)]
        if gaps:
            tail = min(len(old) - gaps[-1] - 1, max(0, len(new) - gaps[0]))
            new = [*new[: gaps[0]], *(old[at] for at in gaps), *new[len(new) - tail :]]
        lines += new
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
