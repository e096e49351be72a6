"""A real Slurm of a few nodes on one machine, each such a host as in ``hosts``. Needs slurm-wlm and munge too."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.collect.proc import read_process
from tests.scenarios.hosts import NETNS, Hosts, require
from tests.scenarios.running import free_port, wait_for

CONF = """\
ClusterName=ddpdoctor
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeAddr={address} CPUs=4 CoresPerSocket=4 RealMemory=1000 State=UNKNOWN\n"
# `ip netns exec` would mount /sys anew and so hide /sys/fs/cgroup, without which slurmd does not start.
ENTER = """
mount -t sysfs sysfs "$2" && mount --rbind /sys/fs/cgroup "$2/fs/cgroup" && mount --rbind "$2" /sys &&
mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/resolv.conf" /etc/resolv.conf &&
hostname "$0" && {start} -N "$0" -f "$3"
"""
STARTS = {False: "exec slurmd", True: "mount -t proc proc /proc && exec slurmd -D"}
"""How a node begins that sees all processes of this machine, and one that sees its own only."""


class Slurm:
    """A controller on this machine and a slurmd on every host."""

    def __init__(self, hosts: Hosts, folder: Path, *, own_pids: bool = False) -> None:
        self.hosts, self.folder, self.own_pids = hosts, folder, own_pids
        self.conf = folder / "slurm.conf"
        self._nodes: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        (self.folder / "state").mkdir()
        # munged wants folders that others may enter, all the way up.
        self.folder.chmod(0o755)
        nodes = enumerate(self.hosts.names)
        self.conf.write_text(
            "".join(NODE.format(name=name, address=self.hosts.address(number)) for number, name in nodes)
            + CONF.format(
                controller=os.uname().nodename.partition(".")[0],
                address=f"{self.hosts.subnet}.1",
                folder=self.folder,
                controller_port=free_port(),
                node_port=free_port(),
            )
        )
        self._start_munge()
        _run("slurmctld", "-c", "-f", str(self.conf))
        for number in range(self.hosts.count):
            self._start_node(number)
        assert wait_for(lambda: self.idle() == self.hosts.count, 200), self._logs()

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        at = self.folder
        _run(
            "munged", "--force", f"--key-file={key}", f"--socket={at}/munge.socket", f"--pid-file={at}/munged.pid",
            f"--log-file={at}/munged.log", f"--seed-file={at}/munge.seed",
        )  # fmt: skip

    def _start_node(self, number: int) -> None:
        name = self.hosts.names[number]
        namespace = self.hosts.namespace(number)
        sys_folder = self.folder / f"sys.{name}"
        sys_folder.mkdir()
        apart = ("--pid", "--fork", "--kill-child") if self.own_pids else ()
        command = (
            "nsenter", f"--net=/run/netns/{namespace}", "unshare", "--uts", "--mount", *apart, "--propagation",
            "private", "--", "sh", "-c", ENTER.format(start=STARTS[self.own_pids]), name, str(NETNS / namespace),
            str(sys_folder), str(self.conf),
        )  # fmt: skip
        if self.own_pids:
            with (self.folder / f"{name}.log").open("wb") as log:
                self._nodes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        else:
            _run(*command)

    def idle(self) -> int:
        """Return how many nodes are ready."""
        return self.run("sinfo", "-h", "-N", "-o", "%T", check=False).stdout.split().count("idle")

    def run(
        self, *command: str, check: bool = True, limit_s: float = 250, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm."""
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL,
            cwd=self.folder, env={**os.environ, **env, "SLURM_CONF": str(self.conf)},
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stderr)
        return done

    def down(self) -> None:
        """End the daemons; those that hosts still run end with the hosts."""
        for node in self._nodes:
            node.kill()
            node.wait()
        reported = []
        for file in self.folder.glob("*.pid"):
            if self.own_pids and file.name.startswith("slurmd."):
                continue  # the number is one of the node's own, and somebody else's here
            with contextlib.suppress(OSError, ValueError):
                os.kill(pid := int(file.read_text()), signal.SIGTERM)
                reported.append(pid)
        wait_for(lambda: not any(map(_runs, reported)), 20)  # they write their state in the end

    def _logs(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()[-1500:]}" for file in self.folder.glob("*.log"))


@contextlib.contextmanager
def lent_slurm(hosts: Hosts, folder: Path, *, own_pids: bool = False) -> Iterator[Slurm]:
    """Give a Slurm for a while."""
    require("slurmctld", "slurmd", "srun", "munged", "nsenter")
    slurm = Slurm(hosts, folder, own_pids=own_pids)
    try:
        slurm.up()
        yield slurm
    finally:
        slurm.down()


def _runs(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and process.state not in "ZX"


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command[0]}: {done.stderr}"
