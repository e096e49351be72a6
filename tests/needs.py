"""What a test needs that not every machine has: without it the test is skipped, and in CI it fails."""

import os
import shutil
from importlib.util import find_spec

import pytest


def need(condition: object, reason: str) -> None:
    """Skip a test that this machine cannot run; in CI that is a failure."""
    if not condition and os.environ.get("CI") == "true":
        pytest.fail(f"in CI this must run: {reason}")
    if not condition:
        pytest.skip(reason)


def need_programs(*names: str) -> None:
    """Need programs on ``PATH``."""
    missing = [name for name in names if shutil.which(name) is None]
    need(not missing, f"needs {', '.join(missing)}")


def need_module(name: str, *, extra: str) -> None:
    """Need a module that comes with an extra of ddpdoctor."""
    need(find_spec(name) is not None, f"needs {name}: pip install -c constraints.txt -e '.[{extra}]'")
