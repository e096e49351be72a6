"""With the dependencies alone, and no extra, every verb works or names the extra that it needs."""

import subprocess
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.scenarios.running import clean_environment, free_port, words_of

ROOT = Path(__file__).parents[2]


def closure(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return what pip would install for a package without its extras."""
    for text in distribution(name).requires or ():
        needed = Requirement(text)
        key = needed.name.lower().replace("_", "-")
        if key not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            found[key] = distribution(needed.name)
            closure(needed.name, found)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Make an environment that holds links to these packages and nothing else; return its Python."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in closure("ddpdoctor", {}).values():
        tops = {Path(file.parts[0]) for file in package.files or () if file.parts[0] not in {"..", "__pycache__"}}
        for top in tops - {Path(one.name) for one in site.iterdir()}:
            (site / top).symlink_to(package.locate_file(top))
    (site / "ddpdoctor").symlink_to(ROOT / "ddpdoctor")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a folder with a model's code and its saved weights."""
    import torch

    folder = tmp_path_factory.mktemp("model")
    (folder / "build.py").write_text("import torch\ndef model():\n    return torch.nn.Linear(2, 1)\n")
    torch.save(torch.nn.Linear(2, 1).state_dict(), folder / "model.pt")
    return folder


def run(python: Path, folder: Path, *arguments: str, status: int = 0) -> str:
    env = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    command = [str(python), "-m", "ddpdoctor", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_nothing_of_the_extras_is_there(python, tmp_path):
    lacking = "import importlib.util as u; print(any(map(u.find_spec, ('matplotlib', 'pytest', 'yaml', 'sklearn'))))"
    done = subprocess.run([str(python), "-c", lacking], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_wrap_and_its_report(python, tmp_path):
    options = (
        "--nproc-per-node=1",
        f"--master-port={free_port()}",
        "--hang-timeout=60",
        "--report-dir=run",
        "--html=page.html",
    )
    reported = run(python, tmp_path, "wrap", *options, *words_of("early_step"), status=1)
    assert "DD604 crash" in reported
    assert "DD604" in (tmp_path / "page.html").read_text()
    for form in ("text", "html"):
        assert "DD604" in run(python, tmp_path, "report", "run", "--format", form)


def test_the_bench_and_the_extra_of_its_plot(python, tmp_path):
    small = ("--nproc-per-node=2", "--max-size=16KiB", "--budget=2s", "--report-dir=bench")
    assert "all_reduce float32" in run(python, tmp_path, "allreduce-bench", *small)
    assert "ddpdoctor[plot]" in run(python, tmp_path, "report", "bench", "--plot", "curve.svg", status=2)
    run(python, tmp_path, "report", "bench", "--plot", "curve.html")


def test_the_extra_of_the_server(python, tmp_path):
    assert "pip install 'ddpdoctor[mcp]'" in run(python, tmp_path, "mcp", status=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check-env", "--fail-on", "never", "--no-torch"),
        ("check-data", "--samples", "12", "--world-size", "2", "--batch-size", "2"),
        ("explain", "DD601"),
        ("check-checkpoint", "model.pt"),
        ("check-consistency", "--diff", "model.pt", "model.pt"),
        ("check-consistency", "--model", "build:model", "--nproc-per-node", "2"),
    ],
    ids=" ".join,
)
def test_other_verbs(python, model, arguments):
    run(python, model, *arguments)
