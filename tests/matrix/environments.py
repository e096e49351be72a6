"""Makes an environment with one version of torch, one of Python, and this ddpdoctor, from the package index."""

import subprocess
import sys
from pathlib import Path
from shutil import rmtree, which

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-warn-script-location")
LIMIT_S = 1200


class NotMadeError(RuntimeError):
    """An environment could not be made; the text says why."""


def find_python(version: str) -> Path | None:
    """Return a Python of this version: on the path, from pyenv, or by its own path."""
    if "/" in version:
        return Path(version)
    found = which(f"python{version}")
    mine = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python3"))
    return mine[-1] if mine else Path(found) if found else None


def make(base: Path, torch: str, folder: Path) -> Path:
    """Return the Python of an environment with torch and ddpdoctor; one that is there already gets a new ddpdoctor.

    Raises:
        NotMadeError: there is no wheel, or pip failed.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        _run(str(base), "-m", "venv", "--without-pip", str(folder))
        (packages,) = folder.glob("lib/python*/site-packages")
        _run(sys.executable, *PIP, "--target", str(packages), "pip")
        _run(str(python), *PIP, f"torch=={torch}.*", "numpy")
    _run(str(python), *PIP, "--force-reinstall", "--no-deps", str(ROOT))
    _run(str(python), *PIP, str(ROOT))
    return python


def remove(folder: Path) -> None:
    """Give the disk back: an environment takes 5 GB."""
    rmtree(folder, ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        text = done.stderr.strip()
        raise NotMadeError("no wheel" if "No matching distribution" in text else text[-300:] or "pip failed")
