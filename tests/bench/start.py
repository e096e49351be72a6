"""What the recorder adds to a Python that never imports torch, and how long ``ddpdoctor --help`` takes.

``python -m tests.bench.start``; half a minute. The package is compiled first, as pip does when it installs it.
"""

import compileall
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ddpdoctor
from tests.bench.pairs import compare, compare_added

PACKAGE = Path(ddpdoctor.__file__).parent
BOOTSTRAP = PACKAGE / "recorder" / "bootstrap"
STARTS = 5
"""Starts of Python that one measurement takes the fastest of."""


def seconds(*command: str, **env: str) -> float:
    """Return the wall time of a command."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **env})
    return time.perf_counter() - began


def start_s(**env: str) -> float:
    """Return the shortest wall time of some Pythons that do nothing."""
    return min(seconds(sys.executable, "-c", "pass", **env) for _ in range(STARTS))


def main() -> None:
    """Print the increments and the ratio."""
    compileall.compile_dir(str(PACKAGE), quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rings", "evidence"):
            (Path(folder) / name).mkdir()
        (Path(folder) / "control").write_bytes(bytes(4096))
        hook = {"PYTHONPATH": str(BOOTSTRAP), "DDPDOCTOR_RUN": folder}
        rank = {**hook, "DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"}
        compare_added("the hook in a helper process adds", lambda: start_s(**hook), start_s, unit="ms", scale=1e3)
        compare_added("in a rank that imports nothing", lambda: start_s(**rank), start_s, unit="ms", scale=1e3)
    command = str(Path(sys.executable).parent / "ddpdoctor")
    compare("ddpdoctor --help over python -c pass", lambda: seconds(command, "--help"), start_s)


if __name__ == "__main__":
    main()
