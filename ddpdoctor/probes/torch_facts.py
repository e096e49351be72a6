"""Prints two lines of JSON about the installed torch for ``collect.bounded``: the build, then what CUDA finds.

It must be as quick as ``python -c "import torch"``, so it imports only what torch imports anyway, and leaves by
``os._exit``. The second line is missing if CUDA hung.
"""

from __future__ import annotations

import os
import sys
from itertools import permutations
from typing import Any

MARK = "ddpdoctor-torch-facts:"  # starts each line of facts, because a wheel or a site hook may print its own lines


def main() -> None:
    """Print the facts; what torch prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        import torch

        build = _build_facts(torch)
    except BaseException as error:  # noqa: BLE001 - whatever keeps torch from being imported is the fact
        last = "".join(f": {line}" for line in _error_lines(error)[-1:])
        _write_facts(out, {"import_error": f"{type(error).__name__}{last}", "path": _where_torch_is()})
        os._exit(0)
    _write_facts(out, build)
    _write_facts(out, _cuda(torch))
    os._exit(0)


def _write_facts(out: Any, facts: dict[str, Any]) -> None:
    import json

    out.write(f"\n{MARK}{json.dumps(facts)}\n")
    out.flush()


def _error_lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def _where_torch_is() -> str | None:
    import importlib.util

    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    # A folder without __init__.py, such as a checkout's, has no origin.
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _build_facts(torch: Any) -> dict[str, Any]:
    libraries = _mapped("libnccl")
    native = sys.modules.get("torch._C")  # it knows what it was built with, and does not touch a GPU for that
    flags = getattr(native, "_cuda_getArchFlags", None)
    # The version of the NCCL header that torch was compiled with
    packed = getattr(native, "_nccl_version", None)
    number = packed() if packed is not None else 0
    # The dynamic linker variable that led to a mapped library, or None
    preloaded = [os.path.realpath(path) for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    folders = {os.path.realpath(path) for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path}
    found_by = None
    if any(library in preloaded for library in libraries):
        found_by = "LD_PRELOAD"
    elif any(os.path.dirname(library) in folders for library in libraries):  # noqa: PTH120 - no pathlib here
        found_by = "LD_LIBRARY_PATH"
    return {
        "version": str(torch.__version__),
        "path": getattr(torch, "__file__", None),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "arch_list": (flags() or "").split() if flags is not None else [],
        "nccl": None if packed is None else f"{number >> 32}.{number >> 16 & 65535}.{number & 65535}",
        "nccl_libraries": libraries,
        "nccl_loaded": _loaded_nccl(libraries),
        "nccl_found_by": found_by,
        "gloo": hasattr(getattr(native, "_distributed_c10d", None), "ProcessGroupGloo"),
    }


def _mapped(name: str) -> list[str]:
    """Return the paths of the libraries that this process has mapped, each file once."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123 - no pathlib here
            paths = {line.split(None, 5)[5].rstrip("\n") for line in maps if f"/{name}.so" in line}
    except OSError:
        return []
    return sorted({os.path.realpath(path) for path in paths})


def _loaded_nccl(libraries: list[str]) -> str | None:
    if not libraries:
        return None
    import ctypes

    number = ctypes.c_int()
    try:
        if ctypes.CDLL(libraries[0]).ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    # NCCL_VERSION in nccl.h: since 2.9 minor and patch have two digits each. Before that the minor version had one.
    scale = 10000 if number.value >= 10000 else 1000
    return f"{number.value // scale}.{number.value % scale // 100}.{number.value % 100}"


def _cuda(torch: Any) -> dict[str, Any]:
    """Return what CUDA finds. On a machine with a dead GPU this may never return."""
    if not (torch.version.cuda or torch.version.hip):
        return {}
    found: dict[str, Any]
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        devices = [_device(torch, index) for index in range(count)]
        peers = [
            {"source": source, "target": target, "possible": bool(torch.cuda.can_device_access_peer(source, target))}
            for source, target in permutations(range(count), 2)
        ]
    except Exception as error:  # noqa: BLE001 - why CUDA cannot be used is the fact
        found = {"cuda_error": next(iter(_error_lines(error)), type(error).__name__)}
    else:
        found = {"cuda_available": count > 0, "device_count": count, "devices": devices, "peers": peers}
    return {**found, "cuda_library": next(iter(_mapped("libcuda")), None)}


def _device(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    return {
        "index": index,
        "name": properties.name,
        "uuid": f"GPU-{uuid}" if uuid is not None else None,
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
    }


if __name__ == "__main__":
    main()
