"""Reads the NVIDIA driver's GPU errors from the kernel's log since boot."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.system import System
from ddpdoctor.model.gpus import KernelView, Xid
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.collect.node import ReadingPlan

KMSG = "/dev/kmsg"
RECORD_BYTES = 8192
"""A read returns one record, and fails if the buffer is too small. The kernel writes no longer records."""
LIMIT_S = 1.5
GRANT = (
    "the kernel's log may not be read: run as root, or let everybody read it with `sudo sysctl "
    "kernel.dmesg_restrict=0`; a container needs --cap-add SYSLOG --device /dev/kmsg"
)
XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?:, )?(?P<text>.*)")
MAX_TEXT = 200
"""How many characters of the driver's message we keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A record of the kernel's log."""

    age_s: float | None
    text: str


def read_kernel_log(system: System, plan: ReadingPlan) -> KernelView:  # noqa: ARG001 - all collectors get both
    """Return the GPU errors since boot; raises ``NotRead`` if the log is missing or we may not read it."""
    return KernelView(xids=tuple(xid for line in read_lines(system) for xid in _xid(line)))


def read_kernel_oom_pids() -> frozenset[int] | None:
    """Return the pids that were killed for memory according to the kernel log, or None if it is not readable."""
    try:
        lines = read_lines(System())
    except NotRead:
        return None
    return frozenset(int(pid) for line in lines for pid in re.findall(r"Killed process (\d+)", line.text))


def read_lines(system: System) -> tuple[LogRecord, ...]:
    """Return the records that are still in the kernel's log; raises ``NotRead``."""
    try:
        records = list(_records(system))
    except OSError as error:
        denied = error.errno in {errno.EPERM, errno.EACCES}
        reason = GRANT if denied else f"there is no kernel log here: {KMSG}: {error.strerror}"
        raise NotRead(Unread(why=Why.DENIED if denied else Why.ABSENT, reason=reason)) from None
    uptime = system.text_or("/proc/uptime").split()
    now_s = float(uptime[0]) if uptime else None
    return tuple(line for record in records for line in _lines(record, now_s))


def _records(system: System) -> Iterator[str]:
    """Yield the current records of /dev/kmsg without waiting for more; a recorded machine has a plain file there."""
    until = time.monotonic() + LIMIT_S
    fd = os.open(system.path(KMSG), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while time.monotonic() < until:
            try:
                record = os.read(fd, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the record was overwritten; the next read returns the oldest one left
                continue
            if not record:
                return
            yield record.decode(errors="replace")
    finally:
        os.close(fd)


def _lines(record: str, now_s: float | None) -> Iterator[LogRecord]:
    """Read "6,1234,5678901234,-;text": priority, number, microseconds since boot."""
    for line in record.splitlines():
        head, separator, text = line.partition(";")
        fields = head.split(",")
        if not separator or len(fields) < 3 or not fields[2].isdecimal():
            continue
        age_s = None if now_s is None else max(0.0, now_s - int(fields[2]) / 1e6)
        yield LogRecord(age_s=age_s, text=text)


def _xid(line: LogRecord) -> Iterator[Xid]:
    found = XID.search(line.text)
    if found:
        yield Xid(
            bus_id=_bus_id(found["bus"]),
            code=int(found["code"]),
            text=found["text"].strip()[:MAX_TEXT],
            age_s=line.age_s,
        )


def _bus_id(text: str) -> str:
    """Return "0000:1b:00.0" for the driver's "0000:1b:00" and for the older form "0000:1b:00.0"."""
    return text.lower() if "." in text else f"{text.lower()}.0"
