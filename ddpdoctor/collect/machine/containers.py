"""Tells what kind of container this is, and of which image, where one is seen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.collect.system import System

_APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_OF_CGROUP = (
    ("kubepods", "kubernetes"),
    ("docker", "docker"),
    ("libpod", "podman"),
    ("containerd", "containerd"),
    ("lxc", "lxc"),
)
"""Words in the path of a process's control group, where the container has no namespace of its own for it."""


def container_kind(system: System) -> str | None:
    """Return docker, podman, kubernetes, apptainer, … or None where no container is seen."""
    if system.env.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if any(system.env.get(name) for name in _APPTAINER):
        return "apptainer"
    if system.exists("/run/.containerenv"):
        return "podman"
    if system.exists("/.dockerenv"):
        return "docker"
    # systemd's convention: whoever starts a container's first process sets "container" in its environment.
    said = system.env.get("container") or _first_process_says(system)
    return said or _from_cgroup(system.text_or("/proc/1/cgroup"))


def _first_process_says(system: System) -> str | None:
    match = re.search(r"(?:^|\0)container=([^\0]+)", system.text_or("/proc/1/environ"))
    return match.group(1) if match else None


def _from_cgroup(text: str) -> str | None:
    return next((kind for word, kind in _OF_CGROUP if re.search(rf"/[^\n]*{word}", text)), None)


def container_image(system: System) -> str | None:
    """Return the image's name where the runtime or the image itself tells it."""
    for name in _APPTAINER:
        if system.env.get(name):
            return system.env[name]
    match = re.search(r'^image="?([^"\n]+)', system.text_or("/run/.containerenv"), re.MULTILINE)
    if match:
        return match.group(1)
    version = system.env.get("NVIDIA_PYTORCH_VERSION")
    return f"nvcr.io/nvidia/pytorch:{version}-py3" if version else None
