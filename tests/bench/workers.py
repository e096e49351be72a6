"""What a job of many loader workers leaves in the run folder and in its rank: python -m tests.bench.workers [200] [50]

Prints, for some epochs, the number of files in the run folder, their size on disk, and the rank's resident memory.
"""

import subprocess
import sys
import tempfile

from tests.scenarios.running import clean_environment, free_port, words_of

SHOWN = 10
ENV = clean_environment()


def main() -> None:
    """Run the job once under ``wrap``."""
    workers, epochs = sys.argv[1:] or ("200", "50")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ddpdoctor", "wrap", "--nproc-per-node=1", f"--master-port={free_port()}",
            "--debug-level=OFF", f"--report-dir={folder}/run", *words_of("loader_workers"), workers, epochs,
        ]  # fmt: skip
        print(f"{workers} workers in each of {epochs} epochs: epoch, files, KiB on disk, KiB resident", flush=True)
        every = max(1, int(epochs) // SHOWN)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) as job:
            assert job.stdout is not None
            for number, line in enumerate(job.stdout):
                if number % every == 0 or number == int(epochs) - 1:
                    print(f"  {line.strip()}", flush=True)
            _, stderr = job.communicate()
    print(f"exit status {job.returncode}; the crash at the end was found: {'DD604 crash' in stderr}")


if __name__ == "__main__":
    main()
