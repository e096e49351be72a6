"""An NVIDIA driver's library for machines without GPUs: answers as one with two GPUs, of which GPU 1 has faults."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "scenarios" / "check_env" / "fake_nvml.c"


def compile_driver(folder: Path) -> Path:
    """Compile libnvidia-ml.so.1 into a folder, and return the folder for ``LD_LIBRARY_PATH``.

    The variable ``FAKE_NVML`` says what else is wrong: "lost", "hang", "dead", "mismatch", "unloaded".
    """
    compiler = shutil.which("cc")
    if compiler is None:
        assert os.environ.get("CI") != "true", "CI has to have a C compiler"
        pytest.skip("needs a C compiler")
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True, timeout=200)
    return folder
