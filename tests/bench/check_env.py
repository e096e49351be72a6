"""How long ``ddpdoctor check-env`` takes, over ``python -c "import torch"``: python -m tests.bench.check_env"""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.pairs import compare

COMMAND = str(Path(sys.executable).parent / "ddpdoctor")


def seconds(*command: str) -> float:
    """Return the wall time of a command. What it found is not looked at here."""
    began = time.perf_counter()
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=dict(os.environ))
    return time.perf_counter() - began


def main() -> None:
    """Print the ratios."""
    torch = (sys.executable, "-c", "import torch")
    compare("check-env over import torch", lambda: seconds(COMMAND, "check-env"), lambda: seconds(*torch))
    compare(
        "check-env --no-torch over import torch",
        lambda: seconds(COMMAND, "check-env", "--no-torch"),
        lambda: seconds(*torch),
    )


if __name__ == "__main__":
    main()
