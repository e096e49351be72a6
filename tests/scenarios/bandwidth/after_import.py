"""Puts a fault into torch.distributed of a rank, from a `sitecustomize` on PYTHONPATH, as a faulty plugin would."""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any


def put_in_rank(variable: str, put_in: Callable[[Any], None]) -> None:
    """Have ``put_in(torch.distributed)`` called once that has been imported, in the rank that a variable names."""
    if os.environ.get("RANK") == os.environ.get(variable, "none"):
        sys.meta_path.insert(0, _AfterImport(put_in))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, put_in: Callable[[Any], None]) -> None:
        self._put_in = put_in

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002 - the protocol's
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self._put_in(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
