"""What a job of many loader workers leaves in the run folder and in its rank: python -m tests.bench.workers [200] [50]

Prints, for some epochs, the number of files in the run folder, their size on disk, and the rank's resident memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

from tests.scenarios.running import JOBS, clean_environment, free_port

SHOWN = 10


def main() -> None:
    """Run the job once under ``wrap``."""
    workers, epochs = sys.argv[1:] or ("200", "50")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ddpdoctor", "wrap", "--nproc-per-node=1", f"--master-port={free_port()}",
            "--debug-level=OFF", f"--report-dir={folder}/run", str(JOBS / "loader_workers.py"), workers, epochs,
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment())
    rows = [line.split() for line in done.stdout.splitlines()]
    print(f"{workers} workers in each of {epochs} epochs: epoch, files, KiB on disk, KiB resident")
    for row in rows[:: max(1, len(rows) // SHOWN)] + rows[-1:]:
        print("  " + "  ".join(row))
    print(f"exit status {done.returncode}; the crash at the end was found: {'DD604 crash' in done.stderr}")


if __name__ == "__main__":
    main()
