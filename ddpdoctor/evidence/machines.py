"""Reads messages of the kernel and of Kubernetes: processes killed for memory, GPU errors, ended pods."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.collect.gpu.kernel_log import XID
from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Exited, Trouble, Who

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

MOST_KILLED = 4096
_KILLED = re.compile(
    r"(?P<where>Memory cgroup out of memory|Out of memory(?: \(oom_kill_allocating_task\))?): Kill(?:ed)? process "
    r"(?P<pid>\d+),? \(?(?P<name>[^),]{1,40})\)?"
)
_OOM_KILL = re.compile(r"oom-kill:constraint=(?P<constraint>\w+),.*?task=(?P<name>[^,]{1,40}),pid=(?P<pid>\d+)")
_TRAINING = re.compile(r"^(?:python|pt_|torchrun|pytest|ray::|accelerate|deepspeed|train)", re.IGNORECASE)
"""Names of processes that may be ranks or their loaders. Another program that is killed is no fault of the job."""
_OFF_BUS = re.compile(
    r"NVRM: GPU (?:at PCI:)?(?P<bus>[0-9A-Fa-f:.]+?):? (?:has fallen off the bus|.{0,80}GPU has fallen)"
)
_NAMED = re.compile(r"NVRM: The NVIDIA GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)")
_FALLEN = "fallen off the bus"
_NO_START = re.compile(r"NVRM: GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+?):? RmInitAdapter failed")
_OTHER_GPU = re.compile(
    r"\b(?:amdgpu|i915|xe) (?P<bus>[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+): .{0,60}?(?P<why>ring \S+ timeout|GPU reset begin"
    r"|GPU HANG|[Ee]ngine reset|GT\d*:? reset|device wedged|Uncorrectable (?:hardware )?error)"
)
_NEAR = 4
_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for (?:GPU|gpu)\s?(?:\d+: )?(?P<bus>[0-9A-Fa-f:.]+): (?P<why>[^\n]+)"
)
_AER = re.compile(r"(?P<device>[0-9A-Fa-f:.]{7,12}): AER: (?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error")
"""A device on PCIe that failed for good. Errors that PCIe corrected, or that are not fatal, are daily business."""
_CAUSES = frozenset({94})
"""Xids that end a process, although the rule of `check-env` only warns of them afterwards."""
MEMORY_FIX = (
    "use less memory a rank (fewer loader workers, smaller batches), or raise the limit of the container or job"
)


class KernelReader:
    """Reads lines of the kernel's log, in dmesg, syslog or journal form."""

    name = "kernel log"
    triggers = (
        b"NVRM: ",
        b"device handle",
        b"ut of memory: Killed",
        b"oom-kill:",
        b": Unknown Error",
        b"amdgpu: ",
        b"GPU HANG",
        b"ngine reset",
        b") error received",
    )

    def __init__(self) -> None:
        self._named: tuple[str, str, int] = ("", "", -_NEAR)
        """The host, the bus and the line of the GPU that a message over several lines names."""
        self._asked: dict[tuple[str, int], tuple[str, Line]] = {}
        """Processes that the kernel chose to kill and has not yet reported as killed."""

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts of one line."""
        text = line.text
        if "NVRM" in text:
            return _gpu_error(line) or self._fallen(line)
        if "amdgpu" in text or "[drm]" in text:
            found = _OTHER_GPU.search(text)
            return (
                () if found is None else [_lost(short_bus(found["bus"]), f"its driver reports: {found['why']}", line)]
            )
        if "device handle" in text:
            return _no_handle(line)
        if "AER: " in text:
            return _pcie_error(line)
        if "out of memory: Kill" not in text and "Out of memory" not in text and "oom-kill:" not in text:
            return ()
        if (found := _KILLED.search(text)) is not None:
            pid = int(found["pid"])
            self._asked.pop((line.who.host, pid), None)
            return _killed(pid, found["name"], line, whole=found["where"].startswith("Out"))
        found = _OOM_KILL.search(text)
        if found is not None and len(self._asked) < MOST_KILLED:
            self._asked[line.who.host, int(found["pid"])] = (found["name"], line)
        return ()

    def _fallen(self, line: Line) -> list[Fact]:
        """Read the message that a GPU is gone, which is broken into lines, and names the GPU in the first."""
        if (named := _NAMED.search(line.text)) is not None:
            self._named = (line.who.host, named["bus"], line.number)
        if _FALLEN not in line.text:
            return []
        host, bus, number = self._named
        known = host == line.who.host and line.number - number < _NEAR
        return [_lost(short_bus(bus) if known else "", "it has fallen off the bus", line)]

    def end(self) -> Iterable[Fact]:
        """Return the processes that the kernel chose to kill, if the log ends before the kernel reports it."""
        for (_, pid), (name, line) in self._asked.items():
            yield from _killed(pid, name, line, whole="CONSTRAINT_NONE" in line.text)
        self._asked.clear()


def _killed(pid: int, name: str, line: Line, *, whole: bool) -> list[Fact]:
    spot, said, host = line.spot(), quote(line.text), line.who.host
    ours = _TRAINING.match(name) is not None
    limit = "the memory of the machine" if whole else "the memory limit of its cgroup"
    facts: list[Fact] = [
        Trouble(
            who=Who(host=host, pid=pid if ours else None), spot=spot, time=line.time, said=said, kind="oom",
            problem=f"the kernel killed process {pid} ({name}): {limit} was used up", fix=MEMORY_FIX, fatal=ours,
        )
    ]  # fmt: skip
    if ours:
        who = Who(host=host, pid=pid)
        facts.append(Exited(who=who, spot=spot, time=line.time, said=said, signal="SIGKILL", memory=True))
    return facts


def _gpu_error(line: Line) -> list[Fact]:
    """Return what an Xid line or another line of NVIDIA's driver says."""
    from ddpdoctor.model.findings import Severity
    from ddpdoctor.rules.environment.xid import CODES, OTHER

    found = XID.search(line.text)
    if found is not None:
        code = int(found["code"])
        severity, meaning, fix = CODES.get(code, OTHER)
        bus = short_bus(found["bus"])
        return [
            Trouble(
                who=Who(host=line.who.host), spot=line.spot(), time=line.time, said=quote(line.text), kind="xid",
                problem=f"the GPU at {bus} had Xid {code}: {meaning}", fix=fix.replace("{index}", bus), gpu=bus,
                fatal=severity is Severity.ERROR or code in _CAUSES,
            )
        ]  # fmt: skip
    if (found := _OFF_BUS.search(line.text)) is not None:
        return [_lost(short_bus(found["bus"]), "it has fallen off the bus", line)]
    found = _NO_START.search(line.text)
    return [] if found is None else [_lost(short_bus(found["bus"]), "its driver cannot start it", line)]


def _no_handle(line: Line) -> list[Fact]:
    found = _NO_HANDLE.search(line.text)
    if found is None:
        return []
    return [_lost(short_bus(found["bus"]), f"nvidia-smi cannot reach it ({quote(found['why'].strip())})", line)]


def _pcie_error(line: Line) -> list[Fact]:
    found = _AER.search(line.text)
    if found is None:
        return []
    device = found["device"]
    return [
        Trouble(
            who=Who(host=line.who.host), spot=line.spot(), time=line.time, said=quote(line.text), kind="pcie",
            problem=f"a device behind the PCIe port {device} failed (AER: an uncorrected fatal error)",
            fix=f"`lspci -tv` shows what is behind {device}: a GPU or an adapter; reseat or replace it, and reboot",
        )
    ]  # fmt: skip


def _lost(bus: str, why: str, line: Line) -> Trouble:
    from ddpdoctor.rules.environment.xid import REBOOT

    return Trouble(
        who=Who(host=line.who.host), spot=line.spot(), time=line.time, said=quote(line.text), kind="gpu-lost",
        problem=f"{f'the GPU at {bus}' if bus else 'a GPU'} is lost: {why}", gpu=bus,
        fix=f"sudo dmesg | grep -E 'NVRM|Xid|amdgpu|drm'; {REBOOT}",
    )  # fmt: skip


def short_bus(text: str) -> str:
    """Return "4e:00" for "0000:4e:00", "00000000:4E:00.0" and "0000:4e:00.0"."""
    return ":".join(text.lower().partition(".")[0].split(":")[-2:])


_POD = re.compile(r"^Name:\s+(?P<pod>[\w.-]+)\s*$")
_FIELD = re.compile(r"^\s*-?\s*(?P<name>[Rr]eason|Exit Code|exitCode):\s*(?P<value>\S+)\s*$")
_ROW = re.compile(r"^(?P<pod>[a-z0-9][\w.-]{1,252})\s+\d+/\d+\s+(?:Init:)?(?P<status>OOMKilled|Evicted)\b")


class KubernetesReader:
    """Reads ``kubectl describe pod``, ``kubectl get pods`` and a pod's YAML."""

    name = "Kubernetes"
    triggers = (b"OOMKilled", b"Exit Code:", b"exitCode:")

    def __init__(self) -> None:
        self._pod = ""
        self._reason = ""

    def read(self, line: Line) -> Iterable[Fact]:
        """Return how a container ended."""
        text = line.text
        if text.startswith("Name:"):
            found = _POD.match(text)
            self._pod, self._reason = (found["pod"], "") if found is not None else (self._pod, self._reason)
            return ()
        if "eason:" in text or "Exit Code:" in text or "exitCode:" in text:
            return tuple(self._field(line))
        if "OOMKilled" in text or "Evicted" in text:
            row = _ROW.match(text)
            if row is not None:
                return tuple(self._ended(row["status"], None, Who(host=row["pod"]), line))
        return ()

    def end(self) -> Iterable[Fact]:
        """Return nothing, because a fact is complete at the exit status."""
        return ()

    def _field(self, line: Line) -> Iterator[Fact]:
        found = _FIELD.match(line.text)
        if found is None:
            return
        value = found["value"]
        if found["name"].lower() == "reason":
            self._reason = value
            if value in {"OOMKilled", "Evicted"}:
                yield from self._ended(value, None, Who(host=self._pod), line)
        elif value.isdigit() and (self._pod or value == "137") and self._reason != "OOMKilled":
            yield from self._ended("", int(value), Who(host=self._pod), line)
            self._reason = ""

    def _ended(self, reason: str, code: int | None, who: Who, line: Line) -> Iterator[Fact]:
        spot, said = line.spot(), quote(line.text)
        if not who.host:
            who = Who(host=line.who.host)
        if reason == "OOMKilled":
            yield Exited(who=who, spot=spot, said=said, signal="SIGKILL", memory=True)
        elif reason == "Evicted":
            problem, fix = "Kubernetes evicted the pod", "kubectl describe node says what ran short there"
            yield Trouble(who=who, spot=spot, said=said, kind="node-failure", problem=problem, fix=fix)
        elif code in {137, 143}:
            signal = "SIGKILL" if code == 137 else "SIGTERM"
            yield Exited(who=who, spot=spot, said=said, signal=signal, by_launcher=code == 143)
        elif code:
            yield Exited(who=who, spot=spot, said=said, code=code)
