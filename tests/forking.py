"""Runs Python in processes that have torch and the command line loaded from the start, see ``tests.preloaded``."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.preloaded import preloaded

LIMIT_S = 250


def start(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start ``python *arguments``: a script, or ``-m`` and a module."""
    command = [sys.executable, *map(str, arguments)]
    with preloaded():
        return subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with nothing to read."""
    process = start(*arguments, cwd=cwd, env=env)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)
