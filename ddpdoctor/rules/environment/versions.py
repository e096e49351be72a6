"""DD101 and DD104: whether torch can be imported, and whether all nodes run the same versions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import Unread, Why, known, need
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.gpus import driver_of
from ddpdoctor.rules.environment.wheels import install_torch, pip, reinstall_torch, torch_package
from ddpdoctor.rules.majority import Split, Voice, compare, describe
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.gpus import Gpu
    from ddpdoctor.model.node import Fleet, Node
    from ddpdoctor.model.software import Software, TorchBuild

_INSTALLED = ("site-packages", "dist-packages")


@rule(
    "DD101",
    "torch-import",
    Severity.ERROR,
    "torch is missing or cannot be imported",
    group=CheckGroup.VERSIONS,
    needs=("software", "torch"),
    reads="`import torch` in a child process; with --no-torch, the package metadata",
)
def check_torch_import(node: Node) -> Answer:
    """Report that `import torch` fails in this Python, with the last line of the error."""
    torch = node.torch
    if isinstance(torch, Unread) and torch.why is Why.NOT_ASKED:
        version = need(node.software).torch_version
        return passed(f"torch {version} is installed; it was not imported") if version else _absent(node)
    build = need(torch)
    if build.import_error is None:
        return passed(f"torch {build.version}{_of_python(node)}")
    missing = re.search(r"No module named '([\w.]+)'", build.import_error)
    if missing and missing.group(1) == "torch":
        return _absent(node)
    problem = Problem(
        summary=f"`import torch` fails: {build.import_error}",
        evidence=(f"torch was found at {build.path}",) if build.path else (),
        fix=_mend(node, build, missing.group(1) if missing else None),
    )
    return judged([problem], build.import_error)


def _of_python(node: Node) -> str:
    software = known(node.software)
    return f", Python {software.python}" if software else ""


def _absent(node: Node) -> Answer:
    software = known(node.software)
    where = f"this Python is {software.executable}" if software else "this Python has no torch"
    problem = Problem(
        summary="torch is not installed in this Python, so no rank can start",
        evidence=(where,),
        fix=install_torch(node),
    )
    return judged([problem], "no package torch")


def _mend(node: Node, build: TorchBuild, missing: str | None) -> str:
    if build.path and not any(folder in build.path for folder in _INSTALLED):
        return f"rename or remove {build.path}: Python finds it before the installed torch"
    if missing and not missing.startswith("torch"):
        return f"{pip(node)} {missing.partition('.')[0]}"
    software = known(node.software)
    return reinstall_torch(node, software.torch_version if software else None)


@rule(
    "DD104",
    "version-same",
    Severity.ERROR,
    "Nodes run different versions of torch, NCCL, the driver or the kernel",
    group=CheckGroup.VERSIONS,
    needs=("software", "torch", "gpus"),
    reads="versions of torch, NCCL, Python, driver, VBIOS, kernel, OFED and image, and the GPU models, of every node",
)
def check_version_same(fleet: Fleet) -> Answer:
    """Compare versions over all nodes, and name the nodes that differ from the majority."""
    nodes = [node for node in fleet.nodes if known(node.software) or known(node.torch) or known(node.gpus)]
    if len(fleet.nodes) < 2:
        return skipped("only one node: nothing to compare")
    splits = {name: (compare(_voices(nodes, value)), severity) for name, value, severity in _COMPARED}
    if splits["GPUs:"][0] is not None:
        # Different models always have a different VBIOS.
        del splits["VBIOS"]
    problems = [_problem(name, split, severity) for name, (split, severity) in splits.items() if split is not None]
    return judged(problems, f"versions of {len(nodes)} nodes: {_seen(nodes)}")


def _voices(nodes: list[Node], value: Callable[[Node], str | None]) -> list[Voice[str]]:
    return [Voice(host=node.host, ranks=node.ranks, value=value(node)) for node in nodes]


def _problem(name: str, split: Split[str], severity: Severity) -> Problem:
    return Problem(
        summary=describe(split, name),
        fix=_same(name, split),
        severity=severity,
        confidence=split.confidence,
        hosts=split.hosts,
    )


def _same(name: str, split: Split[str]) -> str:
    wanted = split.majority.value if split.majority else None
    if name == "torch":
        return (
            f"python -m pip install {torch_package(wanted)}"
            if wanted
            else "install the same torch version on all nodes"
        )
    if name in {"GPUs:", "VBIOS"}:
        return "use nodes of one kind for a job, or expect the speed of the slowest"
    return f"use {name.rstrip(':')} {wanted} on all nodes" if wanted else f"use one {name.rstrip(':')} on all nodes"


def _seen(nodes: list[Node]) -> str:
    first = [f"{name} {value(nodes[0])}" for name, value, _ in _COMPARED if nodes and value(nodes[0])]
    return ", ".join(first[:4]) or "none is known"


def torch_of(node: Node) -> str | None:
    """Return the version of torch, or None if it is not known."""
    torch, software = known(node.torch), known(node.software)
    return (torch.version if torch else None) or (software.torch_version if software else None)


def nccl_of(node: Node) -> str | None:
    """Return the version of NCCL that is loaded, or else the one that torch came with."""
    torch, software = known(node.torch), known(node.software)
    if torch is not None and torch.version:
        return torch.nccl_loaded or torch.nccl
    return software.nccl_wheel if software else None


def of_software(value: Callable[[Software], str | None]) -> Callable[[Node], str | None]:
    """Return a function that reads a value from the software of a node."""

    def read(node: Node) -> str | None:
        software = known(node.software)
        return value(software) or None if software else None

    return read


def _of_gpus(value: Callable[[Gpu], str | None]) -> Callable[[Node], str | None]:
    """Return a function for a node's distinct values over its GPUs, joined by "and"."""

    def read(node: Node) -> str | None:
        gpus = known(node.gpus)
        found = {value(gpu) for gpu in gpus.devices} if gpus else set()
        return " and ".join(sorted(one for one in found if one)) or None

    return read


_COMPARED: tuple[tuple[str, Callable[[Node], str | None], Severity], ...] = (
    ("torch", torch_of, Severity.ERROR),
    ("NCCL", nccl_of, Severity.ERROR),
    ("Python", of_software(lambda one: ".".join(one.python.split(".")[:2])), Severity.WARNING),
    ("NVIDIA driver", driver_of, Severity.WARNING),
    ("GPUs:", _of_gpus(lambda gpu: gpu.name), Severity.WARNING),
    ("VBIOS", _of_gpus(lambda gpu: gpu.vbios), Severity.WARNING),
    ("kernel", of_software(lambda one: one.kernel), Severity.WARNING),
    ("OFED", of_software(lambda one: one.ofed), Severity.WARNING),
    ("container image", of_software(lambda one: one.image), Severity.WARNING),
)
