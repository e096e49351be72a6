"""Several hosts on one machine, each with a network, /etc/hosts and host name of its own. Needs root and iproute2."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.needs import need, need_programs
from tests.preloaded import can_fork
from tests.preloaded.asking import HOST

NETNS = Path("/etc/netns")
"""`ip netns exec NAME` puts what lies in NETNS/NAME over /etc."""


def require(*tools: str) -> None:
    """Skip the test where this is not root or a tool is missing; in CI that is a failure."""
    need(os.geteuid() == 0, "needs root")
    need_programs(*tools)


class Hosts:
    """Hosts dd0, dd1, … on a bridge. Names of namespaces and links carry numbers of this process and of these hosts.

    So runs do not collide, nor hosts with earlier ones, whose links the kernel may take away a little later.
    """

    _numbers = itertools.count()

    def __init__(self, count: int) -> None:
        self.count = count
        self.tag = f"d{os.getpid() % 0x10000:04x}{next(self._numbers) % 0x100:02x}"
        self.subnet = f"10.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}"
        self.names = tuple(f"dd{number}" for number in range(count))
        self._started: list[subprocess.Popen[str]] = []
        self._holders: dict[int, subprocess.Popen[str]] = {}
        """By host, a process whose namespaces forked Pythons enter."""

    def address(self, number: int) -> str:
        return f"{self.subnet}.{10 + number}"

    def namespace(self, number: int) -> str:
        return f"{self.tag}h{number}"

    def up(self) -> None:
        bridge = f"{self.tag}br"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number in range(self.count):
            self._add_host(number, bridge)

    def _add_host(self, number: int, bridge: str) -> None:
        name, link = self.namespace(number), f"{self.tag}v{number}"
        lines = ["127.0.0.1 localhost", *(f"{self.address(n)} {host}" for n, host in enumerate(self.names))]
        (NETNS / name).mkdir(parents=True)
        self.write(number, "hosts", "\n".join(lines) + "\n")
        self.write(number, "resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", link, "master", bridge, "up")
        _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "route", "add", "default", "via", f"{self.subnet}.1")

    def write(self, number: int, file: str, text: str) -> None:
        """Write a file that the host has in /etc."""
        self._holders.pop(number, None)  # it has the files of its start
        (NETNS / self.namespace(number) / file).write_text(text)

    def ip(self, number: int, *arguments: str) -> None:
        """Run `ip` on a host: `ip(1, "link", "set", "eth0", "mtu", "1400")`."""
        _ip("-n", self.namespace(number), *arguments)

    def start(self, number: int, *command: str, **more: Any) -> subprocess.Popen[str]:
        """Start a command on a host."""
        env = dict(os.environ if more.get("env") is None else more["env"])
        if can_fork(list(command), env):
            return self._popen(command, **{**more, "env": {**env, HOST: str(self._holder(number).pid)}})
        return self._popen(self._command(number, *command), **more)

    def _command(self, number: int, *command: str) -> tuple[str, ...]:
        setting = 'hostname "$0" && exec "$@"'
        network = ("ip", "netns", "exec", self.namespace(number))
        return (*network, "unshare", "--uts", "--", "sh", "-c", setting, self.names[number], *command)

    def _popen(self, command: tuple[str, ...], **more: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
        )
        self._started.append(process)
        return process

    def _holder(self, number: int) -> subprocess.Popen[str]:
        if number not in self._holders:
            holder = self._popen(self._command(number, "sh", "-c", "echo ready && exec sleep infinity"))
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n", "the host cannot be entered"
            self._holders[number] = holder
        return self._holders[number]

    @contextlib.contextmanager
    def filtered(self, number: int, *rules: str, policy: str = "accept") -> Iterator[None]:
        """Filter what comes in to a host, save for its own."""
        require("nft")
        chain = f"add chain inet dd in {{ type filter hook input priority 0; policy {policy}; }}"
        added = (f"add rule inet dd in {rule}" for rule in ("iif lo accept", *rules))
        self.run(number, "nft", "; ".join(["add table inet dd", chain, *added]))
        try:
            yield
        finally:
            self.run(number, "nft", "delete table inet dd")

    def run(self, number: int, *command: str) -> str:
        """Run a command on a host to its end, which must be a good one."""
        process = self.start(number, *command)
        stdout, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr
        return stdout

    def down(self) -> None:
        """End what still runs on the hosts and take everything away."""
        for number in range(self.count):
            name = self.namespace(number)
            for pid in _ip("netns", "pids", name, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("link", "del", f"{self.tag}v{number}", check=False)
            _ip("netns", "del", name, check=False)
            shutil.rmtree(NETNS / name, ignore_errors=True)
        _ip("link", "del", f"{self.tag}br", check=False)
        for process in self._started:
            process.communicate(timeout=200)


@contextlib.contextmanager
def lent_hosts(count: int) -> Iterator[Hosts]:
    """Give hosts for a while."""
    require("ip", "unshare")
    hosts = Hosts(count)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True, timeout=200)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
