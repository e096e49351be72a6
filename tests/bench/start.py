"""How long ``ddpdoctor --help`` and the recorder's start take, as ratios: python -m tests.bench.start"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ddpdoctor.recorder
from tests.bench.pairs import compare

BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"


def seconds(*command: str, **env: str) -> float:
    """Return the wall time of a command."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **env})
    return time.perf_counter() - began


def main() -> None:
    """Print the ratios."""
    plain = (sys.executable, "-c", "pass")
    command = str(Path(sys.executable).parent / "ddpdoctor")
    compare("ddpdoctor --help over python -c pass", lambda: seconds(command, "--help"), lambda: seconds(*plain))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rings", "evidence"):
            (Path(folder) / name).mkdir()
        (Path(folder) / "control").write_bytes(bytes(4096))
        hook = {"PYTHONPATH": str(BOOTSTRAP), "DDPDOCTOR_RUN": folder}
        rank = {**hook, "DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"}
        compare(
            "a helper process with the hook over one without", lambda: seconds(*plain, **hook), lambda: seconds(*plain)
        )
        compare(
            "a rank that imports nothing over python -c pass", lambda: seconds(*plain, **rank), lambda: seconds(*plain)
        )


if __name__ == "__main__":
    main()
