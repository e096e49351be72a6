"""The full report of ``nvidia-smi -q``: what it says about the health of each GPU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.evidence.machines import KernelReader, short_bus
from ddpdoctor.evidence.quotes import quote
from ddpdoctor.evidence.reader import Found, Line
from ddpdoctor.model.evidence import Spot, Trouble, Who

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.evidence.reader import Document
    from ddpdoctor.model.evidence import Fact

_GPU = re.compile(r"^GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_FIELD = re.compile(r"^(?P<indent>\s+)(?P<name>[^:]{1,80}?)\s*(?::\s*(?P<value>.*?))?\s*$")
_COOLING = "look at cooling and power: nvidia-smi -q -d TEMPERATURE,POWER"
_ERRORS = ("Unknown Error", "GPU is lost", "GPU requires reset", "ERR!")


class NvidiaSmiReader:
    """Reads a tree of "Key : Value" for each GPU."""

    name = "nvidia-smi -q"

    def recognizes(self, head: bytes) -> bool:
        """Return whether it is the full report."""
        return b"NVSMI LOG" in head

    def read(self, document: Document) -> Found:
        """Return the faults that it shows."""
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
            field = _FIELD.match(text) if gpu else None
            if field is None:
                continue
            depth = len(field["indent"])
            path = [one for one in path if one[0] < depth]
            if field["value"] is None:
                path.append((depth, field["name"]))
                continue
            if field["value"] in _ERRORS and gpu in lost:
                continue
            for fact in _judge([*(name for _, name in path), field["name"]], field["value"], gpu, line):
                lost.update([gpu] if fact.kind == "gpu-lost" else [])
                facts.append(fact)
        return Found(facts=facts, lines=len(lines))


def _judge(path: list[str], value: str, gpu: str, line: Line) -> Iterator[Trouble]:
    """Return the fault that one value shows, or None if it is healthy."""
    from ddpdoctor.rules.environment.xid import REBOOT, RESET

    name, above = path[-1], " / ".join(path)
    reset = RESET.replace("{index}", gpu)
    if value in _ERRORS:
        yield _trouble("gpu-lost", f"the driver cannot read the GPU at {gpu}: {value}", REBOOT, gpu, line)
    elif "Volatile" in path and _uncorrected(path) and value.isdigit() and int(value):
        words = f"the memory of the GPU at {gpu} has {value} errors that ECC could not correct"
        yield _trouble("xid", words, reset, gpu, line)
    elif "Remapped Rows" in above and name == "Pending" and value == "Yes":
        words = f"the GPU at {gpu} has a bad memory row that only a reset takes out of use"
        yield _trouble("xid", words, reset, gpu, line)
    elif "Remapped Rows" in above and "Failure" in name and value == "Yes":
        words = f"the GPU at {gpu} has a bad memory row that could not be taken out of use"
        yield _trouble("xid", words, REBOOT, gpu, line)
    elif name == "GPU Recovery Action" and value not in {"None", "N/A"}:
        words = f"the driver asks for a recovery of the GPU at {gpu}: {value}"
        yield _trouble("gpu-lost", words, reset, gpu, line)
    elif name in {"HW Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown"} and value == "Active":
        words = f"the hardware slows the GPU at {gpu} down ({name})"
        yield _trouble("slowdown", words, _COOLING, gpu, line, fatal=False)


def _uncorrected(path: list[str]) -> bool:
    """Return whether a counter is one of errors that were not corrected, in the words of old and new drivers."""
    return "Uncorrectable" in path[-1] or "Double Bit" in " ".join(path)


def _trouble(kind: str, words: str, fix: str, gpu: str, line: Line, *, fatal: bool = True) -> Trouble:
    spot = Spot(source=line.source, line=line.number)
    return Trouble(
        who=line.who, spot=spot, said=quote(line.text), kind=kind, problem=words, fix=fix, gpu=gpu, fatal=fatal
    )
