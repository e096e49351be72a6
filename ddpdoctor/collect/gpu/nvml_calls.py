"""Calls NVML functions by name, and turns its error codes into names."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


class NvmlError(Exception):
    """NVML returned an error; ``name`` is NVML's name for it, such as "GPU_IS_LOST"."""

    def __init__(self, name: str) -> None:
        """Keep the name."""
        super().__init__(name)
        self.name = name


class Nvml:
    """Wraps pynvml or a recording of it; all errors become ``NvmlError``."""

    def __init__(self, module: ModuleType | Any) -> None:
        """Wrap the module."""
        self._module = module

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function; raises ``NvmlError``, also if this pynvml lacks the function."""
        found = getattr(self._module, function, None)
        if found is None:
            raise NvmlError("FUNCTION_NOT_FOUND")
        try:
            return found(*arguments)
        except self._module.NVMLError as error:
            raise NvmlError(self.error_name(error.value)) from error

    def fill(self, function: str, handle: Any, struct: str) -> Any:
        """Call a function that fills in a struct, and return the struct; raises ``NvmlError``."""
        made = getattr(self._module, struct, None)
        if made is None:
            raise NvmlError("FUNCTION_NOT_FOUND")
        filled = made()
        self.call(function, handle, ctypes.byref(filled))
        return filled

    def error_name(self, code: int) -> str:
        """Return "GPU_IS_LOST" for 15."""
        return self._error_names.get(code, f"ERROR_{code}")

    @cached_property
    def _error_names(self) -> dict[int, str]:
        names = (name for name in dir(self._module) if name.startswith("NVML_ERROR_"))
        return {getattr(self._module, name): name.removeprefix("NVML_ERROR_") for name in names}

    def constant(self, name: str, default: int) -> int:
        """Return a constant of the module, or the default if the module is too old to have it."""
        return int(getattr(self._module, name, default))
