"""Machines: the kernel's log, Kubernetes, nvidia-smi, the report of check-env, and nccl-tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.kernel import XID
from ddpdoctor.logs.lines import DocumentFormat, Found, Line, LineReader, quote
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.log_facts import Exited, Finished, Hint, MachineSeen, Spot, Trouble, Who
from ddpdoctor.model.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.logs.lines import Document
    from ddpdoctor.model.log_facts import Fact

MOST_KILLED = 4096
_KILLED = re.compile(
    r"(?P<where>Memory cgroup out of memory|Out of memory(?: \(oom_kill_allocating_task\))?): Kill(?:ed)? process "
    r"(?P<pid>\d+),? \(?(?P<name>[^),]{1,40})\)?"
)
_OOM_KILL = re.compile(r"oom-kill:constraint=(?P<constraint>\w+),.*?task=(?P<name>[^,]{1,40}),pid=(?P<pid>\d+)")
# Names of processes that may be ranks or their loaders. Another program that is killed is no fault of the job.
_TRAINING = re.compile(r"^(?:python|pt_|torchrun|pytest|ray::|accelerate|deepspeed|train)", re.IGNORECASE)
_OFF_BUS = re.compile(
    r"NVRM: GPU (?:at PCI:)?(?P<bus>[0-9A-Fa-f:.]+?):? (?:has fallen off the bus|.{0,80}GPU has fallen)"
)
_NAMED = re.compile(r"NVRM: The NVIDIA GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)")
_FALLEN, _OFF = "fallen off the bus", "it has fallen off the bus"
_NO_START = re.compile(r"NVRM: GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+?):? RmInitAdapter failed")
_OTHER_GPU = re.compile(
    r"\b(?:amdgpu|i915|xe) (?P<bus>[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+): .{0,60}?(?P<why>ring \S+ timeout|GPU reset begin"
    r"|GPU HANG|[Ee]ngine reset|GT\d*:? reset|device wedged|Uncorrectable (?:hardware )?error)"
)
_NEAR = 4
_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for (?:GPU|gpu)\s?(?:\d+: )?(?P<bus>[0-9A-Fa-f:.]+): (?P<why>[^\n]+)"
)
# A device on PCIe that failed for good. Errors that PCIe corrected, or that are not fatal, are daily business.
_AER = re.compile(r"(?P<device>[0-9A-Fa-f:.]{7,12}): AER: (?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error")
_CAUSES = frozenset({94})  # Xids that end a process, although the rule of `check-env` only warns of them afterwards
MEMORY_FIX = (
    "use less memory per rank (fewer loader workers, smaller batches), or raise the limit of the container or job"
)


@dataclass(slots=True, eq=False)
class KernelReader(LineReader):
    """Reads lines of the kernel's log, in dmesg, syslog or journal form."""

    name = "kernel log"
    triggers = (
        b"NVRM: ", b"device handle", b"ut of memory: Killed", b"oom-kill:", b": Unknown Error", b"amdgpu: ",
        b"GPU HANG", b"ngine reset", b") error received",
    )  # fmt: skip
    begins = ("NVRM", "amdgpu", "[drm]", "device handle", "AER: ", "out of memory: Kill", "Out of memory", "oom-kill:")
    # The host, the bus and the line of the GPU that a message over several lines names.
    _named: tuple[str, str, int] = ("", "", -_NEAR)
    # Processes that the kernel chose to kill and has not yet reported as killed.
    _asked: dict[tuple[str, int], tuple[str, Line]] = field(default_factory=dict)

    def read(self, line: Line) -> Iterable[Fact]:
        text = line.text
        if "NVRM" in text:
            if facts := _gpu_error(line):
                return facts
            if (named := _NAMED.search(text)) is not None:  # a message over several lines, the GPU in the first
                self._named = (line.who.host, named["bus"], line.number)
            host, bus, number = self._named
            known = host == line.who.host and line.number - number < _NEAR
            return [_gpu_lost(short_bus(bus) if known else "", _OFF, line)] if _FALLEN in text else ()
        if "amdgpu" in text or "[drm]" in text:
            return _lost(_OTHER_GPU, "its driver reports: {}", line)
        if "device handle" in text:
            return _lost(_NO_HANDLE, "nvidia-smi cannot reach it ({})", line)
        if "AER: " in text:
            if (found := _AER.search(text)) is None:
                return ()
            device = found["device"]
            problem = f"a device behind the PCIe port {device} failed (AER: an uncorrected fatal error)"
            fix = f"`lspci -tv` shows what is behind {device}: a GPU or an adapter; reseat or replace it, and reboot"
            return [Trouble(kind="pcie", problem=problem, fix=fix, **line.says(Who(host=line.who.host)))]
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

    def end(self) -> Iterable[Fact]:
        for (_, pid), (name, line) in self._asked.items():
            yield from _killed(pid, name, line, whole="CONSTRAINT_NONE" in line.text)
        self._asked.clear()


def _killed(pid: int, name: str, line: Line, *, whole: bool) -> list[Fact]:
    ours = _TRAINING.match(name) is not None
    limit = "the memory of the machine" if whole else "the memory limit of its cgroup"
    problem = f"the kernel killed process {pid} ({name}): {limit} was used up"
    said = line.says(Who(host=line.who.host, pid=pid if ours else None))
    killed = [Exited(signal="SIGKILL", memory=True, **said)] if ours else []
    return [Trouble(kind="oom", problem=problem, fix=MEMORY_FIX, fatal=ours, **said), *killed]


def _gpu_error(line: Line) -> list[Fact]:
    from ddpdoctor.model.findings import Severity
    from ddpdoctor.rules.environment.gpus import OTHER_XID, XIDS

    found = XID.search(line.text)
    if found is not None:
        code = int(found["code"])
        severity, meaning, fix = XIDS.get(code, OTHER_XID)
        bus = short_bus(found["bus"])
        problem, fix = f"the GPU at {bus} had Xid {code}: {meaning}", fix.replace("{index}", bus)
        fatal, host = severity is Severity.ERROR or code in _CAUSES, Who(host=line.who.host)
        return [Trouble(kind="xid", problem=problem, fix=fix, gpu=bus, fatal=fatal, **line.says(host))]
    return _lost(_OFF_BUS, _OFF, line) or _lost(_NO_START, "its driver cannot start it", line)


def _lost(pattern: re.Pattern[str], why: str, line: Line) -> list[Fact]:
    """Return that a GPU is lost, if a line has the pattern, which may capture why."""
    found = pattern.search(line.text)
    if found is None:
        return []
    words = found.groupdict().get("why")
    return [_gpu_lost(short_bus(found["bus"]), why.format(quote(words.strip())) if words else why, line)]


def _gpu_lost(bus: str, why: str, line: Line) -> Trouble:
    from ddpdoctor.rules.environment.gpus import REBOOT

    return Trouble(
        **line.says(Who(host=line.who.host)), kind="gpu-lost", gpu=bus,
        problem=f"{f'the GPU at {bus}' if bus else 'a GPU'} is lost: {why}",
        fix=f"sudo dmesg | grep -E 'NVRM|Xid|amdgpu|drm'; {REBOOT}",
    )  # fmt: skip


def short_bus(text: str) -> str:
    """Return "4e:00" for "0000:4e:00", "00000000:4E:00.0" and "0000:4e:00.0"."""
    return ":".join(text.lower().partition(".")[0].split(":")[-2:])


_POD = re.compile(r"^Name:\s+(?P<pod>[\w.-]+)\s*$")
_FIELD = re.compile(r"^\s*-?\s*(?P<name>[Rr]eason|Exit Code|exitCode):\s*(?P<value>\S+)\s*$")
_ROW = re.compile(r"^(?P<pod>[a-z0-9][\w.-]{1,252})\s+\d+/\d+\s+(?:Init:)?(?P<status>OOMKilled|Evicted)\b")


@dataclass(slots=True, eq=False)
class KubernetesReader(LineReader):
    """Reads ``kubectl describe pod``, ``kubectl get pods`` and a pod's YAML."""

    name = "Kubernetes"
    triggers = (b"OOMKilled", b"Exit Code:", b"exitCode:")
    begins = ("Name:", "eason:", "Exit Code:", "exitCode:", "OOMKilled", "Evicted")
    _pod: str = ""
    _reason: str = ""

    def read(self, line: Line) -> Iterable[Fact]:
        text = line.text
        if text.startswith("Name:"):
            found = _POD.match(text)
            self._pod, self._reason = (found["pod"], "") if found is not None else (self._pod, self._reason)
            return ()
        if "eason:" in text or "Exit Code:" in text or "exitCode:" in text:
            return tuple(self._field(line))
        row = _ROW.match(text) if "OOMKilled" in text or "Evicted" in text else None
        return () if row is None else tuple(self._ended(row["status"], None, row["pod"], line))

    def _field(self, line: Line) -> Iterator[Fact]:
        found = _FIELD.match(line.text)
        if found is None:
            return
        value = found["value"]
        if found["name"].lower() == "reason":
            self._reason = value
            if value in {"OOMKilled", "Evicted"}:
                yield from self._ended(value, None, self._pod, line)
        elif value.isdigit() and (self._pod or value == "137") and self._reason != "OOMKilled":
            yield from self._ended("", int(value), self._pod, line)
            self._reason = ""

    def _ended(self, reason: str, code: int | None, host: str, line: Line) -> Iterator[Fact]:
        said: dict[str, Any] = {"who": Who(host=host or line.who.host), "spot": line.spot(), "said": quote(line.text)}
        if reason == "OOMKilled":
            yield Exited(signal="SIGKILL", memory=True, **said)
        elif reason == "Evicted":
            problem, fix = "Kubernetes evicted the pod", "kubectl describe node shows what ran out there"
            yield Trouble(kind="node-failure", problem=problem, fix=fix, **said)
        elif code in {137, 143}:
            yield Exited(signal="SIGKILL" if code == 137 else "SIGTERM", by_launcher=code == 143, **said)
        elif code:
            yield Exited(code=code, **said)


_GPU = re.compile(r"^GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_SMI_FIELD = re.compile(r"^(?P<indent>\s+)(?P<name>[^:]{1,80}?)\s*(?::\s*(?P<value>.*?))?\s*$")
_COOLING = "look at cooling and power: nvidia-smi -q -d TEMPERATURE,POWER"
_ERRORS = ("Unknown Error", "GPU is lost", "GPU requires reset", "ERR!")


def _read_smi(document: Document) -> Found:
    facts: list[Fact] = []
    lines = document.body.decode("utf-8", "replace").splitlines()
    gpu, lost = "", set[str]()
    path: list[tuple[int, str]] = []
    who = Who(host=document.who.host)
    for number, text in enumerate(lines, 1):
        line = Line(text=text, number=number, source=document.source, who=who)
        if "device handle" in text:
            facts += KernelReader().read(line)
            continue
        if (found := _GPU.match(text)) is not None:
            gpu, path = short_bus(found["bus"]), []
            continue
        field = _SMI_FIELD.match(text) if gpu else None
        if field is None:
            continue
        depth = len(field["indent"])
        path = [part for part in path if part[0] < depth]
        if field["value"] is None:
            path.append((depth, field["name"]))
            continue
        if field["value"] in _ERRORS and gpu in lost:
            continue
        fact = _smi_trouble([*(name for _, name in path), field["name"]], field["value"], gpu, line)
        if fact is not None:
            lost.update([gpu] if fact.kind == "gpu-lost" else [])
            facts.append(fact)
    return Found(facts=facts, lines=len(lines))


# A tree of "Key : Value" for each GPU.
NVIDIA_SMI = DocumentFormat("nvidia-smi -q", lambda head: b"NVSMI LOG" in head, _read_smi)


def _smi_trouble(path: list[str], value: str, gpu: str, line: Line) -> Trouble | None:
    from ddpdoctor.rules.environment.gpus import REBOOT, RESET

    name, above = path[-1], " / ".join(path)
    is_uncorrected = "Uncorrectable" in name or "Double Bit" in " ".join(path)  # in the words of new and old drivers
    kind, fix = "xid", RESET.replace("{index}", gpu)
    if value in _ERRORS:
        kind, words, fix = "gpu-lost", f"the driver cannot read the GPU at {gpu}: {value}", REBOOT
    elif "Volatile" in path and is_uncorrected and value.isdigit() and int(value):
        words = f"the memory of the GPU at {gpu} has {value} errors that ECC could not correct"
    elif "Remapped Rows" in above and name == "Pending" and value == "Yes":
        words = f"the GPU at {gpu} has a bad memory row that stays in use until a reset"
    elif "Remapped Rows" in above and "Failure" in name and value == "Yes":
        words, fix = f"the GPU at {gpu} has a bad memory row that could not be taken out of use", REBOOT
    elif name == "GPU Recovery Action" and value not in {"None", "N/A"}:
        kind, words = "gpu-lost", f"the driver requests a recovery of the GPU at {gpu}: {value}"
    elif name in {"HW Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown"} and value == "Active":
        kind, words, fix = "slowdown", f"the hardware slows the GPU at {gpu} down ({name})", _COOLING
    else:
        return None
    return Trouble(
        who=line.who, spot=line.spot(), said=quote(line.text), kind=kind, problem=words, fix=fix, gpu=gpu,
        fatal=kind != "slowdown",
    )  # fmt: skip


_MARK = re.compile(rb'^\s*\{\s*"schema_version": \d+,\s*"tool": \{\s*"name": "ddpdoctor"')


def _read_report(document: Document) -> Found:
    try:
        plain = json.loads(document.body).get("data", {}).get("nodes")
        nodes = [decode(Node, node) for node in plain or ()]
    except (ValueError, AttributeError, TypeError, RecursionError, WrongValue) as error:
        return Found(problem=f"damaged ({type(error).__name__})")
    spot = Spot(source=document.source)
    facts = [MachineSeen(who=Who(host=node.host), spot=spot, node=node) for node in nodes]
    return Found(facts=[*facts], problem="" if nodes else "a report without facts about machines")


# The facts about machines in a report.json of ``check-env``.
MACHINE_FACTS = DocumentFormat("report of check-env", lambda head: _MARK.match(head) is not None, _read_report)

_PROGRAM = re.compile(r"# Collective test starting: (?P<name>\w+)")
_HALF = r"\s+[\d.]+\s+(?P<alg{n}>[\d.]+)\s+(?P<bus{n}>[\d.]+)\s+(?P<wrong{n}>N/A|[\d.e+]+)"
_TABLE_ROW = re.compile(r"^\s*(?P<size>\d+)\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+" + _HALF.format(n=0) + _HALF.format(n=1))
_BOUNDS = re.compile(r"# Out of bounds values : (?P<count>\d+) (?P<result>OK|FAILED)")
_AVERAGE = re.compile(r"# Avg bus bandwidth\s*: (?P<busbw>[\d.]+)")


@dataclass(slots=True, eq=False)
class NcclTestsReader(LineReader):
    """Reads the tables of all programs of nccl-tests."""

    name = "nccl-tests"
    triggers = (b"# Collective test starting", b"# Using devices", b"# Out of bounds values", b"# Avg bus bandwidth")
    _program: str = "nccl-tests"
    _best: tuple[float, int] = (0.0, 0)
    _wrong: tuple[int, Line] | None = None

    def read(self, line: Line) -> Iterable[Fact]:
        text = line.text
        if text[:1].isspace() and (found := _TABLE_ROW.match(text)) is not None:
            size = int(found["size"])
            self._best = max(self._best, *((float(found[half]), size) for half in ("bus0", "bus1")))
            wrongs = [found[half] for half in ("wrong0", "wrong1")]
            if self._wrong is None and any(wrong != "N/A" and float(wrong) > 0 for wrong in wrongs):
                self._wrong = (size, line)
        elif not text.startswith("#"):
            return ()
        elif (found := _PROGRAM.match(text)) is not None:
            facts = tuple(self.end())
            self._program, self._best = found["name"], (0.0, 0)
            return facts
        elif (found := _BOUNDS.match(text)) is not None:
            wrong, self._wrong = self._wrong, None
            where = f"at {wrong[0]} bytes" if wrong is not None else f"{found['count']} times"
            return (_wrong_results(self._program, where, line),) if found["result"] == "FAILED" or wrong else ()
        elif (found := _AVERAGE.match(text)) is not None:
            best = f", at most {self._best[0]:g} at {self._best[1]} bytes" if self._best[1] else ""
            words = f"{self._program}: bus bandwidth {float(found['busbw']):g} GB/s on average{best}"
            common: dict[str, Any] = {"who": line.who, "spot": line.spot(), "said": quote(text)}
            return (Hint(words=words, kind="nccl-tests", **common), Finished(**common))
        return ()

    def end(self) -> Iterable[Fact]:
        wrong, self._wrong = self._wrong, None
        return () if wrong is None else (_wrong_results(self._program, f"at {wrong[0]} bytes", wrong[1]),)


def _wrong_results(program: str, where: str, line: Line) -> Trouble:
    return Trouble(
        who=line.who, spot=line.spot(), said=quote(line.text), kind="wrong-data",
        problem=f"{program} got wrong results {where}: data is corrupted in transit or in memory",
        fix="do not train with this; look for memory errors (`ddpdoctor check-env`, dcgmi diag -r 3), and find the "
        "host with `ddpdoctor allreduce-bench --pairs`; NCCL_P2P_DISABLE=1 and NCCL_ALGO=Ring narrow it down",
    )  # fmt: skip
