"""An NVIDIA driver's library for machines without GPUs: answers as one with two GPUs, of which GPU 1 has faults."""

import subprocess
from pathlib import Path

from tests.needs import need_programs

SOURCE = Path(__file__).parent / "scenarios" / "check_env" / "fake_nvml.c"


def compile_driver(folder: Path) -> Path:
    """Compile libnvidia-ml.so.1 into a folder, and return the folder for ``LD_LIBRARY_PATH``.

    The variable ``FAKE_NVML`` says what else is wrong: "lost", "hang", "dead", "mismatch", "unloaded".
    """
    need_programs("cc")
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True, timeout=200)
    return folder
