"""Lends a Python without py-spy."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def other_python():
    """Return a Python beside which there is no py-spy. ``attach`` needs nothing but the standard library."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    if sys.base_prefix == sys.prefix or (python.parent / "py-spy").exists():
        pytest.skip("this Python has py-spy, or there is no other")
    return str(python)
