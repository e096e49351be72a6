"""The pip command that installs a torch that fits a machine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.reading import known
from ddpdoctor.model.software import release
from ddpdoctor.rules.environment.gpus import driver_of, nvidia_gpus

if TYPE_CHECKING:
    from ddpdoctor.model.node import Node

INDEX = "https://download.pytorch.org/whl/"
SELECTOR = "https://pytorch.org/get-started/locally"
CUDA_WHEELS = (
    ("cu130", 580, (2, 9), None),
    ("cu128", 570, (2, 7), (2, 11)),
    ("cu126", 525, (2, 6), None),
    ("cu118", 450, (2, 0), (2, 7)),
)
"""Index, lowest driver, and the first and last torch in that index: https://pytorch.org/get-started/previous-versions.
A build for CUDA 12.8 runs on driver 525 too, but such a driver fits a build for 12.6 better."""


def pip(node: Node) -> str:
    """Return the beginning of a pip command for the Python that ran the check."""
    software = known(node.software)
    return f"{software.executable if software else 'python'} -m pip install"


def cuda_wheel(version: str | None, driver: str | None) -> str | None:
    """Return the index whose build of a torch version fits a driver, or None if no build does."""
    torch, major = release(version)[:2], (release(driver) or (0,))[0]
    for index, lowest, first, last in CUDA_WHEELS:
        fits = not torch or (torch >= first and (last is None or torch <= last))
        if fits and major >= lowest and (torch or last is None):
            return index
    return None


def install_cuda_torch(node: Node, version: str | None) -> str:
    """Return the command that installs a CUDA build of a torch version, or of the newest one."""
    driver = driver_of(node)
    index = cuda_wheel(version, driver)
    if index is None:
        return f"upgrade the NVIDIA driver ({driver or 'unknown version'}), then install a CUDA build: {SELECTOR}"
    plain = ".".join(str(part) for part in release(version))
    # Without the local version, pip would accept an installed CPU build.
    wanted = torch_package(f"{plain}+{index}") if plain else f"torch --index-url {INDEX}{index}"
    return f"{pip(node)} {wanted}"


def install_torch(node: Node) -> str:
    """Return the command that installs torch on a machine that has none."""
    if nvidia_gpus(node):
        return install_cuda_torch(node, None)
    software = known(node.software)
    if software is not None and software.platform == "darwin":
        return f"{pip(node)} torch"
    return f"{pip(node)} torch --index-url {INDEX}cpu"


def reinstall_torch(node: Node, version: str | None) -> str:
    """Return the command that reinstalls the present version of torch."""
    if not version:
        return install_torch(node)
    return f"{pip(node)} --force-reinstall {torch_package(version)}"


def torch_package(version: str) -> str:
    """Return what pip installs a version of torch from: PyPI has no version with a local part, such as +cu130."""
    local = re.search(r"\+(cpu|cu\d+|rocm[\d.]+)$", version)
    return f"torch=={version}" + (f" --index-url {INDEX}{local.group(1)}" if local else "")
