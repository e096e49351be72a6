"""Calls NVML by the names of its functions, and gives its errors their names."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


class NvmlError(Exception):
    """NVML refused; ``name`` is its name of the error, such as "GPU_IS_LOST"."""

    def __init__(self, name: str) -> None:
        """Keep the name."""
        super().__init__(name)
        self.name = name


class Nvml:
    """NVML: pynvml, or what answers in its stead. Its errors come as ``NvmlError``."""

    def __init__(self, module: ModuleType | Any) -> None:
        """Wrap the module."""
        self._module = module

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function; raises ``NvmlError``, also where this pynvml does not have it."""
        found = getattr(self._module, function, None)
        if found is None:
            raise NvmlError("FUNCTION_NOT_FOUND")
        try:
            return found(*arguments)
        except self._module.NVMLError as error:
            raise NvmlError(self.error_name(error.value)) from error

    def fill(self, function: str, handle: Any, struct: str) -> Any:
        """Call a function that fills in a structure, and return that; raises ``NvmlError``."""
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
        """Return one of the module's constants, or the default where it is older than that."""
        return int(getattr(self._module, name, default))
