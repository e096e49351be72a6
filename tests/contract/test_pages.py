"""The pages agree with the command line: each command that they name can be typed, and prints what they show."""

import os
import shlex
import shutil
import tarfile
from pathlib import Path

import pytest

from ddpdoctor.cli.listing import VERBS
from tests import forking, pages
from tests.contract.conftest import CLEARED

BLOCKS = {f"{block.name} in {block.page.name}": block for block in pages.blocks()}
RUN_BY_DEMO_TESTS = {"demo", "demo-crash", "demo-input-bound"}
"""Held by tests/scenarios/test_demo.py, which runs these jobs anyway."""
RECORDED = {path.name.partition(".")[0] for path in pages.RECORDED.glob("*.json.xz")}
SAVED_RUNS = Path(__file__).parents[1] / "data" / "runs"


@pytest.fixture
def typed(tmp_path: Path):
    """Type the commands of a block in a folder that has the files which pages name; return what they print."""
    for path in pages.RECORDED.iterdir():
        if not path.name.endswith(".json.xz"):
            shutil.copy(path, tmp_path)
    clean = {name: value for name, value in os.environ.items() if not CLEARED.search(name)}
    env = {**clean, "PYTHONPATH": str(pages.ROOT), "OMP_NUM_THREADS": "1"}

    def run(commands: tuple[str, ...]) -> str:
        printed = ""
        for command in commands:
            program, *words = shlex.split(command)
            if program == "export":
                env.update(word.split("=", 1) for word in words)
                continue
            assert program == "ddpdoctor", command
            done = forking.run("-m", "ddpdoctor", *words, cwd=tmp_path, env=env)
            printed += done.stdout or done.stderr
        return printed

    return run


def test_each_block_with_output_has_a_name():
    bare = [
        f"{page.name}: {match['body'].splitlines()[0]}"
        for page in pages.pages()
        for match in pages.FENCE.finditer(page.read_text())
        if not match["name"] and any(line.startswith("$ ") for line in match["body"].splitlines())
    ]
    assert bare == []


@pytest.mark.parametrize("key", [key for key, block in BLOCKS.items() if block.name in RECORDED])
def test_a_recorded_run_is_drawn_as_its_page_shows_it(key):
    block = BLOCKS[key]
    assert pages.differs(block.shown, pages.draw(pages.recorded(block.name)), pages.mask_places) == ""


@pytest.mark.parametrize(
    "key", [key for key, block in BLOCKS.items() if block.name not in RECORDED | RUN_BY_DEMO_TESTS]
)
def test_a_command_prints_what_its_page_shows(key, typed, tmp_path):
    block = BLOCKS[key]
    if block.name in PREPARED:
        PREPARED[block.name](tmp_path)
    assert pages.differs(block.shown, typed(block.commands)) == ""


def unpack_drift(folder: Path) -> None:
    with tarfile.open(SAVED_RUNS / "drift.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def unpack_compared(folder: Path) -> None:
    with tarfile.open(pages.RECORDED / "compare.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def make_checkpoint() -> dict:
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


@pytest.mark.parametrize("page", pages.pages(), ids=lambda path: str(path.relative_to(pages.ROOT)))
def test_each_command_that_a_page_names_can_be_typed(page):
    assert [" ".join(words) for words in pages.commands_of(page) if not can_be_typed(words)] == []


def can_be_typed(words: list[str]) -> bool:
    """Read a command line as ``ddpdoctor`` reads it; in the place of a value there may be a name for it."""
    from ddpdoctor.cli.verbs import UsageError, make_command
    from ddpdoctor.model.errors import UserError

    words = [word for word in words if word not in {"...", "…"}]
    if not words or words[0] in {"--help", "--version", "--install-completion"}:
        return True
    verb, *rest = words
    if verb not in VERBS:
        return False
    try:
        make_command(verb).make_context(verb, [word for word in rest if word not in {"--help", "-h"}])
    except UserError as error:
        return error.message.startswith("no script to run")
    except UsageError as error:
        return type(error).__name__ == "MissingParameter"
    return True


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("check-env --skip xid --deep", True),
        ("check-env --skipp xid", False),
        ("check-environment", False),
        ("wrap --nproc-per-node 8 train.py --any-option", True),
        ("wrap --hang-timeout never train.py", False),
        ("report RUN_DIR --format pdf", False),
        ("check-checkpoint", True),
    ],
)
def test_a_wrong_command_line_is_seen(line, right):
    assert can_be_typed(line.split()) is right


@pytest.mark.parametrize(
    ("shown", "printed", "first"),
    [
        ("a 1.5 ms\nb", "a 22 ms\nb", ""),
        ("a\nb", "a\nx\nb", "b"),
        ("a\n... (more)\nb", "a\nx\ny\nb", ""),
        ("a\n...", "a\nx", ""),
        ("a", "a\nx", "and then: x"),
        ("a\nrank 1 is stuck", "a\nrank 1 is stopped", "rank 1 is stuck"),
        ("report in ddpdoctor-demo-abc/report", "report in /tmp/ddpdoctor-demo-x_1/report", ""),
    ],
)
def test_an_output_that_differs_is_seen(shown, printed, first):
    assert pages.differs(shown, printed) == first
