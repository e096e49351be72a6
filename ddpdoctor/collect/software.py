"""Reads software versions from files and package metadata, torch's from a child process, and NCCL's settings files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import posixpath
import re
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.bounded import TORCH_PROBE, ChildProcess, start_module, wait_for_program
from ddpdoctor.model.launch import hide_login, is_listed
from ddpdoctor.model.node import ConfFile, Software, TorchBuild
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from ddpdoctor.collect.system import ReadingPlan, System

NO_DRIVER = Unread(why=Why.ABSENT, reason="no NVIDIA driver found")
LIBRARY = "libnvidia-ml.so.1"
DRIVER_TRACES = ("/proc/driver/nvidia", "/dev/nvidiactl")
DRIVER_VERSION = "/proc/driver/nvidia/version"
# Folders of the driver's libraries on distributions, WSL, NVIDIA's container runtime, GKE and NixOS.
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib64",
    "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64", "/run/opengl-driver/lib",
)  # fmt: skip
_NVML = re.compile(r"libnvidia-ml\.so\.\d{3}\.[\d.]+")
_GPU_DEVICE = re.compile(r"nvidia\d+|kfd|dxg")
# A requirement that PyPI's wheels have, because their version has no "+cu130".
_TORCH_CUDA = re.compile(
    r"^(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit(?:\[[^\]]*\])?)\s*\(?==\s*(\d+\.\d+)", re.IGNORECASE
)
MOST_HOSTS_LINES = 1024  # our choice: enough for all hosts of a large cluster, but not for a list of blocked addresses
_LOOPBACK = ("127.", "::1", "fe00::", "ff00::", "ff02::")
_APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
# Words in a cgroup path, which show the container if it has no cgroup namespace of its own.
_OF_CGROUP = (
    ("kubepods", "kubernetes"),
    ("docker", "docker"),
    ("libpod", "podman"),
    ("containerd", "containerd"),
    ("lxc", "lxc"),
)
MARK = "ddpdoctor-torch-facts:"  # as in ``probes.torch_facts``, which loads torch
# Our choice: enough for a cold import from a network file system on a busy cluster, and for CUDA without a persistence
# daemon, which takes a few seconds for each GPU. It is below the section's limit, so that facts from before a hang are
# not lost.
CHILD_LIMIT_S = 55.0
SYSTEM_FILE = "/etc/nccl.conf"
USER_FILE = ".nccl.conf"
FILE_VARIABLE = "NCCL_CONF_FILE"
FIRST_BY_HOME = "2.30.3"
# Up to this release, NCCL takes ~ from the password database; from the one above, it takes ~ from HOME. We saw this by
# running the releases under strace.
LAST_BY_DATABASE = "2.29.7"
LONGEST = 1023  # how many bytes of a name or value NCCL keeps (src/misc/param.cc, setEnvFile)
MOST_BYTES = 1 << 20  # our choice: a larger file is not a settings file


def read_software(system: System, plan: ReadingPlan) -> Software:  # noqa: ARG001 - all collectors get both
    """Return the versions of the installed software."""
    from importlib import metadata

    driver, is_open = read_driver(system)
    torch_version = torch_cuda = nccl_wheel = None
    with contextlib.suppress(metadata.PackageNotFoundError):
        torch = metadata.distribution("torch") if system.live else None
        if torch is not None:
            torch_version, torch_cuda = torch.version, cuda_of_wheel(torch.version, torch.requires or ())
            for name in ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
                with contextlib.suppress(metadata.PackageNotFoundError):
                    nccl_wheel = metadata.version(name)
    try:
        kernel = system.calls.kernel()
    except OSError:
        kernel = system.text_or("/proc/sys/kernel/osrelease")
    releases = map(system.text_or, ("/etc/os-release", "/usr/lib/os-release"))
    os_names = (re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE) for release in releases)
    # Folders that are the same place are read once, and links to libraries have other names.
    folders = {system.path(folder).resolve(): folder for folder in reversed(LIBRARY_FOLDERS)}.values()
    # The version of NVIDIA's (Mellanox's) out-of-tree drivers; the kernel's own have none, or the kernel's.
    ofed = system.text_or("/sys/module/mlx5_core/version")
    hosts_lines, hosts_own = _digest_hosts(system)
    libraries = [f"{folder}/{name}" for folder in folders for name in system.names(folder) if _NVML.fullmatch(name)]
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        kernel=kernel,
        os_name=next((name[1] for name in os_names if name), ""),
        platform=system.calls.platform(),
        wsl="microsoft" in kernel.lower() or system.exists("/proc/sys/fs/binfmt_misc/WSLInterop"),
        container=container_kind(system),
        image=container_image(system),
        torch_version=torch_version,
        nccl_wheel=nccl_wheel,
        driver=driver,
        driver_is_open=is_open,
        nvml_libraries=tuple(sorted(libraries)),
        ofed=None if ofed in {"", system.text_or("/proc/sys/kernel/osrelease")} else ofed,
        torch_cuda=torch_cuda,
        gpu_devices=tuple(f"/dev/{name}" for name in system.names("/dev") if _GPU_DEVICE.fullmatch(name)),
        hosts_lines=hosts_lines,
        hosts_own=hosts_own,
    )


def is_nvidia_here(system: System) -> bool:
    """Return whether NVIDIA's driver seems installed, without loading it."""
    if any(system.exists(path) for path in DRIVER_TRACES):
        return True
    folders = (*LIBRARY_FOLDERS, *system.env.get("LD_LIBRARY_PATH", "").split(":"))
    return any(system.exists(f"{folder}/{LIBRARY}") for folder in folders if folder.startswith("/"))


def read_driver(system: System) -> tuple[str | None, bool | None]:
    """Return the version of NVIDIA's kernel driver, and whether it is the open one, or None for both if not loaded."""
    line = next(iter(system.text_or(DRIVER_VERSION).splitlines()), "")
    match = re.search(r"\s(\d{3}\.\d+(?:\.\d+)?)\s", f"{line} ")
    if not match:
        return None, None
    return match.group(1), "Open Kernel Module" in line


def _digest_hosts(system: System) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return a digest of each line in /etc/hosts (None without the file), and the digests that name this host."""
    try:
        text = system.text("/etc/hosts")
        own = system.calls.hostname()
    except OSError:
        return None, ()
    lines, own_lines = set(), set()
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if names and not address.startswith(_LOOPBACK):
            digest = hashlib.sha256(f"{address} {' '.join(names)}".encode()).hexdigest()[:12]
            lines.add(digest)
            if own in names or own in names[0].split("."):
                own_lines.add(digest)
    return tuple(sorted(lines)[:MOST_HOSTS_LINES]), tuple(sorted(own_lines))


def cuda_of_wheel(version: str, requires: list[str] | tuple[str, ...]) -> str | None:
    """Return a wheel's CUDA version from "2.13.0+cu130" or its requirements, or None for other builds."""
    local = re.search(r"\+cu(\d{2})(\d)$", version)
    if local:
        return f"{local.group(1)}.{local.group(2)}"
    if "+" in version:
        return None
    matches = (_TORCH_CUDA.match(requirement) for requirement in requires)
    return next((match.group(1) for match in matches if match), None)


def container_kind(system: System) -> str | None:
    """Return "docker", "podman", "kubernetes", "apptainer" etc., or None if nothing indicates a container."""
    if system.env.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if any(system.env.get(name) for name in _APPTAINER):
        return "apptainer"
    if system.exists("/run/.containerenv"):
        return "podman"
    if system.exists("/.dockerenv"):
        return "docker"
    # By systemd's convention, a container manager sets "container" in the first process's environment.
    of_first = re.search(r"(?:^|\0)container=([^\0]+)", system.text_or("/proc/1/environ"))
    said = system.env.get("container") or (of_first and of_first[1])
    cgroup = system.text_or("/proc/1/cgroup")
    return said or next((kind for word, kind in _OF_CGROUP if re.search(rf"/[^\n]*{word}", cgroup)), None)


def container_image(system: System) -> str | None:
    """Return the image's name if the runtime or the image itself reveals it."""
    for name in _APPTAINER:
        if system.env.get(name):
            return system.env[name]
    match = re.search(r'^image="?([^"\n]+)', system.text_or("/run/.containerenv"), re.MULTILINE)
    if match:
        return match.group(1)
    version = system.env.get("NVIDIA_PYTORCH_VERSION")
    return f"nvcr.io/nvidia/pytorch:{version}-py3" if version else None


def read_torch(system: System, plan: ReadingPlan) -> TorchBuild:
    """Return the child's facts; raises ``NotRead`` if torch must not be imported or the import did not end."""
    if not plan.use_torch:
        raise NotRead(Unread(why=Why.NOT_ASKED, reason="torch is not imported (--no-torch)"))
    if not system.live:
        raise NotRead(Unread(why=Why.ABSENT, reason="a recorded machine cannot import torch"))
    child = plan.torch_child if plan.torch_child is not None else start_module((TORCH_PROBE,), system.env)
    return wait_for_torch(child, CHILD_LIMIT_S)


def wait_for_torch(child: ChildProcess, limit_s: float) -> TorchBuild:
    """Wait for a started child, and turn its output into facts."""
    # The child that asks NVML imports this module, and needs neither of these.
    from ddpdoctor.collect.recorded import read_record
    from ddpdoctor.model.facts import signal_name

    ended = wait_for_program(child, limit_s)
    status = ended.status
    said = [json.loads(line.removeprefix(MARK)) for line in ended.out.splitlines() if line.startswith(MARK)]
    if not said and status is None:
        raise NotRead(Unread(why=Why.TIMEOUT, reason=f"`import torch` took longer than {limit_s:.0f} s"))
    end = f"ended with status {status}" if status is None or status >= 0 else f"was killed by {signal_name(-status)}"
    if not said:
        lines = [line.strip() for line in ended.err.splitlines() if line.strip()]
        more = f": {lines[-1]}" if lines else ""
        if status is not None and status < 0:
            more = ": the wheel is built for another processor" if -status == signal.SIGILL else ""
        return read_record(TorchBuild, {"import_error": f"the interpreter {end} while it imported torch{more}"})
    facts: dict[str, Any] = {key: value for part in said for key, value in part.items()}
    if len(said) == 1 and "import_error" not in facts:
        late = f"CUDA was not initialized within {limit_s:.0f} s"
        error = late if status is None else f"the process {end} while it initialized CUDA"
        facts |= {"cuda_error": error, "cuda_stuck": True}
    return read_record(TorchBuild, facts)


def read_conf_files(system: System, plan: ReadingPlan) -> tuple[ConfFile, ...]:  # noqa: ARG001 - all collectors get both
    """Read NCCL's files as NCCL does, in order of precedence.

    NCCL reads ``$NCCL_CONF_FILE``, or else ``~/.nccl.conf``, and then ``/etc/nccl.conf``, and sets only variables that
    are not set yet (``initEnvFunc`` and ``setEnvFile`` in src/misc/param.cc). If HOME and the password database differ,
    we read both homes, because NCCL's version decides which counts.
    """
    chosen = system.env.get(FILE_VARIABLE, "")
    files = [_empty_conf(chosen)] if chosen else _confs_at_home(system)
    if chosen != SYSTEM_FILE:
        files.append(_empty_conf(SYSTEM_FILE))
    read = [file for empty in files if (file := _read_conf(system, empty, wanted=empty.path == chosen)) is not None]
    users = {name for file in read if file.path != SYSTEM_FILE for name in file.variables}
    return tuple(
        replace(file, hidden_by_file=tuple(name for name in file.variables if name in users))
        if file.path == SYSTEM_FILE
        else file
        for file in read
    )


def _empty_conf(path: str, since: str = "", until: str = "") -> ConfFile:
    return ConfFile(
        path=path, variables={}, hidden_by_env=(), hidden_by_file=(), bad_lines=(), since=since, until=until
    )


def _confs_at_home(system: System) -> list[ConfFile]:
    try:
        database = posixpath.normpath(system.calls.home())
    except OSError:
        database = ""
    home = system.env.get("HOME", "") and posixpath.normpath(system.env["HOME"])
    differ = bool(home and database and home != database)
    files = []
    if home:
        files.append(_empty_conf(posixpath.join(home, USER_FILE), since=FIRST_BY_HOME if home != database else ""))
    if database and (differ or not home):
        files.append(_empty_conf(posixpath.join(database, USER_FILE), until=LAST_BY_DATABASE if differ else ""))
    return files


def _read_conf(system: System, empty: ConfFile, *, wanted: bool) -> ConfFile | None:
    """Parse lines as NCCL does: "#" starts a comment only in the first column, and white space is not stripped."""
    path = system.path(empty.path) if empty.path.startswith("/") else empty.path
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 - NCCL also opens relative names, from the working folder
            text = stream.read(MOST_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return replace(empty, unread="file not found") if wanted else None
    except OSError as error:
        return replace(empty, unread=(error.strerror or "it cannot be read").lower())
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    bad, repeated = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        name, equals, value = line.partition("=")
        if not equals or not name or name != "".join(name.split()):
            bad.append(number)
        elif name in values:
            repeated.append(number)
        else:
            values[name], lines[name] = value[:LONGEST], number
    shown = {name: hide_login(value) if is_listed(name) else "" for name, value in values.items()}
    hidden, wrong, again = tuple(name for name in values if name in system.env), tuple(bad), tuple(repeated)
    return replace(empty, variables=shown, hidden_by_env=hidden, bad_lines=wrong, lines=lines, repeated_lines=again)
