"""How long it takes from the command to the script's first line: python -m tests.bench.first_line; two minutes.

``ddpdoctor wrap`` over ``torchrun``, with two ranks. The first of the ranks to come writes the time.
"""

import compileall
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ddpdoctor
from tests.bench.pairs import compare
from tests.scenarios.running import clean_environment, free_port

SCRIPT = """
import time
began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
import sys
with open(sys.argv[1], "a") as file:
    file.write("%d\\n" % began)
"""
BIN = Path(sys.executable).parent


def first_line_s(*command: str) -> float:
    """Return the time from the start of a command to the first line of its script."""
    with tempfile.TemporaryDirectory() as folder:
        script, result = Path(folder) / "script.py", Path(folder) / "times"
        script.write_text(SCRIPT)
        run = ["--report-dir", f"{folder}/run"] if command[0] == "ddpdoctor" else []
        rest = ["--nproc-per-node=2", f"--master-port={free_port()}", str(script), str(result)]
        began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        subprocess.run(
            [str(BIN / command[0]), *command[1:], *run, *rest], check=True, capture_output=True, env=clean_environment()
        )
        return (min(map(int, result.read_text().split())) - began) / 1e9


def main() -> None:
    """Print the ratio."""
    compileall.compile_dir(str(Path(ddpdoctor.__file__).parent), quiet=1)
    compare(
        "to the first line under wrap over torchrun", lambda: first_line_s("ddpdoctor", "wrap"),
        lambda: first_line_s("torchrun"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
