"""Recorded machines: a text file a machine, unpacked into a folder that the real collectors read.

A line of ``tests/data/MACHINE/machine.txt``, and of ``tests/data/MACHINE/STATE.txt``, which changes it:

    /sys/class/net/eth0/mtu = 1500            a file and its text; \\n and \\t are understood
    /sys/bus/pci/devices/X -> ../../devices/Y a symbolic link
    /sys/bus/pci/devices/X/config := 86800020 @0x40 0d00 @0x1000
                                              a file of bytes, in hexadecimal; @ fills up with zeros to an offset
    /sys/bus/pci/devices/X/ vendor=0x10de max_link_speed="32.0 GT/s PCIe"
                                              files of a folder, each with its text
    /sys/class/infiniband/                    an empty folder
    !/sys/class/net/eth0                      take away what an earlier line made
    $NCCL_IB_HCA = mlx5_0                     a variable of the environment
    @hostname = dgx01                         an answer to a call, see RecordedCalls
    @resolve dgx01 = 10.0.0.1 10.0.0.2
    @resolve nowhere ! -2 Name or service not known
    @addresses eth0 = 10.0.0.4/24 fe80::1/64
    @interface en0 = up 1500 1000             of a machine without sysfs: state, MTU, megabits per second
    @bind 29500 plain ! 98 Address already in use
    @run nft list ruleset = table inet filter {\\n}
    @run iptables-save ! 1 Permission denied  a command that ends with status 1
    # a comment
"""

import errno
import os
import re
import shlex
import shutil
import socket
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partialmethod
from pathlib import Path

from ddpdoctor.collect.bounded import ChildEnd
from ddpdoctor.collect.system import System

DATA = Path(__file__).parent / "data"
FOLDER = re.compile(r"(?P<folder>/\S*)/ (?P<files>\S+=.*)")


@dataclass
class RecordedCalls:
    """Answers by call and argument. What was not recorded fails as it would where it is not there."""

    answers: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def _answer(self, *key):
        name = " ".join(key)
        if name in self.errors:
            number, _, text = self.errors[name].partition(" ")
            kind = {"resolve": socket.gaierror, "reverse": socket.gaierror}.get(key[0], OSError)
            raise kind(int(number), text)
        if name not in self.answers:
            raise OSError(errno.ENOENT, f"not recorded: {name}")
        return self.answers[name]

    hostname = partialmethod(_answer, "hostname")
    kernel = partialmethod(_answer, "kernel")
    fqdn = partialmethod(_answer, "fqdn")

    def platform(self):
        return self.answers.get("platform", "linux")

    def home(self):
        return self.answers.get("home", "/root")

    def rlimit(self, name):
        soft, hard = self._answer("rlimit", name).split()
        return int(soft), int(hard)

    def cpus(self):
        found = []
        for part in self._answer("cpus").split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
        return tuple(found)

    def statvfs(self, path):
        total, free = self._answer("statvfs", path).split()
        return int(total), int(free)

    def writable(self, path):
        return self.answers.get(f"writable {path}", "yes") == "yes"

    def readable(self, path):
        return self.answers.get(f"readable {path}", "yes") == "yes"

    def resolve(self, name):
        return tuple(self._answer("resolve", name).split())

    def reverse(self, address):
        return self._answer("reverse", address)

    def interface_addresses(self):
        return {key.split()[1]: tuple(text.split()) for key, text in self._all("addresses")}

    def interface_states(self):
        found = {}
        for key, text in self._all("interface"):
            state, mtu, speed = text.split()
            found[key.split()[1]] = (state == "up", int(mtu), int(speed))
        return found

    def _all(self, call):
        return [(key, text) for key, text in self.answers.items() if key.startswith(f"{call} ")]

    def bind(self, port, *, reuse):
        name = f"bind {port} {'reuse' if reuse else 'plain'}"
        if name in self.errors:
            self._answer(name)

    def run(self, command, limit_s):  # noqa: ARG002 - what was recorded has ended
        name = f"run {' '.join(command)}"
        if name in self.errors:
            status, _, text = self.errors[name].partition(" ")
            return ChildEnd(status=int(status), out="", err=text)
        return ChildEnd(status=0, out=self._answer(name).replace("\\n", "\n"), err="")

    def clock_unsynchronized(self):
        return self._answer("clock") == "unsynchronised"


def shared_machine(name, *states, env=None):
    """Return a recorded machine, changed by the states in turn, as a System. Nobody may write to its folder."""
    system = _unpacked(name, states)
    return replace(system, env={**system.env, **(env or {})}, calls=deepcopy(system.calls))


@cache
def _unpacked(name, states):
    return load_machine(name, Path(_folder().name) / "-".join((name, *states)), *states)


@cache
def _folder():
    """Return where machines are unpacked for all tests: in memory if there is any, since a disk is ten times slower."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="recorded-machines-", dir=place)


def load_machine(name, root, *states, env=None):
    """Unpack a recorded machine into ``root``, changed by the states in turn; return it as a System."""
    root.mkdir(parents=True, exist_ok=True)
    calls = RecordedCalls()
    variables = {}
    for part in ("machine", *states):
        for line in (DATA / name / f"{part}.txt").read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                _apply(line.rstrip(), root, calls, variables)
    return System(root=root, env={**variables, **(env or {})}, calls=calls)


def _apply(line, root, calls, variables):
    if line.startswith("$"):
        name, _, value = line[1:].partition(" = ")
        variables[name.rstrip(" =")] = value
    elif line.startswith("@"):
        _apply_call(line[1:], calls)
    elif line.startswith("!"):
        _remove(root / line[1:].lstrip("/"))
    elif line.startswith("/") and (files := FOLDER.fullmatch(line)):
        for file in shlex.split(files["files"]):
            _apply_file(f"{files['folder']}/{file.replace('=', ' = ', 1)}", root)
    elif line.startswith("/"):
        _apply_file(line, root)
    else:
        raise ValueError(f"no such line in a recorded machine: {line}")


def _apply_call(line, calls):
    name, failed, text = line.partition(" ! ")
    if failed:
        calls.errors[name] = text
        return
    name, _, text = line.partition(" = ")
    calls.errors.pop(name, None)
    calls.answers[name] = text


def _apply_file(line, root):
    for mark in (" := ", " -> ", " ="):
        name, found, text = line.partition(mark)
        if not found:
            continue
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(path)
        if mark == " := ":
            path.write_bytes(_bytes(text))
        elif mark == " -> ":
            path.symlink_to(text)
        else:
            path.write_text(text.removeprefix(" ").replace("\\n", "\n").replace("\\t", "\t") + "\n", encoding="utf-8")
        return
    (root / line.lstrip("/")).mkdir(parents=True, exist_ok=True)


def _bytes(text):
    found = b""
    for word in text.split():
        found = found.ljust(int(word[1:], 0), b"\0") if word.startswith("@") else found + bytes.fromhex(word)
    return found


def _remove(path):
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
