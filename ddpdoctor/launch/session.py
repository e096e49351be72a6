"""One wrapped job from its start to its end: launch, watch, take evidence, have it judged, stop, save."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect import proc
from ddpdoctor.collect.runfolder import RUN_FORMAT, RUN_VERSION
from ddpdoctor.launch.guardian import Guardian, is_same, stop_tree
from ddpdoctor.launch.machine import note_machine
from ddpdoctor.launch.nccl_log import nccl_log_environment
from ddpdoctor.launch.watch import Suspicion, Watch
from ddpdoctor.model.findings import Judgement, Severity
from ddpdoctor.model.secrets import hide_secrets

if TYPE_CHECKING:
    from ddpdoctor.launch.options import WrapOptions

LOOK_EVERY_S = 0.1
LOOK_AGAIN_S = 1.5
STOP_GRACE_S = 5.0
LAUNCHER_TAKES_OVER_S = 0.5
HUNG_STATUS = 124
INTERRUPTED_STATUS = 130
STORED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG",
    "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "NODE_RANK", "OMP_NUM_THREADS", "RANK",
    "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID", "TORCH_DISTRIBUTED_DEBUG", "WORLD_SIZE",
)  # fmt: skip
"""The only environment variables that a run folder holds."""
SHARED_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"})

Judge = Callable[[Path, int | None], Judgement]
"""Reads a run folder and says what is wrong with an attempt, by default the last. Launch itself knows no rules."""
Reporter = Callable[["Outcome"], None]
"""Shows an outcome while the job goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a wrapped job ended, for the report."""

    folder: Path
    """Where the recorders wrote; the run folder itself, unless that is on a shared file system."""
    run_dir: Path
    judgement: Judgement
    hung: bool
    launcher_status: int | None
    exit_status: int
    interrupted_by: str | None
    earlier: tuple[Judgement, ...]
    """What was wrong with attempts that the launcher has restarted."""
    started_at: str
    ended_at: str


class Session:
    """The state of one wrapped job."""

    def __init__(self, options: WrapOptions, judge: Judge, save: Reporter, show: Reporter) -> None:
        """``judge`` reads facts from the folder; ``save`` writes report.json; ``show`` prints while the job goes on."""
        self.options = options
        self.judge = judge
        self.save_report = save
        self.show = show
        self.run_dir = options.report_dir.resolve()
        self.folder = _choose_folder(self.run_dir)
        self.started_at = _now()
        self.launched_ns = time.monotonic_ns()
        self.signals: list[tuple[signal.Signals, int]] = []
        """What the watcher was sent, and when."""
        self.hang: Judgement | None = None
        self.earlier: list[Judgement] = []
        self.attempt = 0
        self.last_look_ns = 0
        self.next_look_ns = 0
        self.shown_until_ns = 0
        self.patience_s = 1.0
        self.shown: tuple[Any, ...] = ()

    def run(self) -> Outcome:
        """Run the job to its end."""
        write_run_file(self.folder, self.options, self.started_at, self.launched_ns)
        self.watch = Watch(self.folder, self.options.hang_timeout_s, self.launched_ns)
        guardian = Guardian(self._orphaned)
        with self._handling_signals():
            self.launcher = subprocess.Popen(self._command(), env=self._environment())
            guardian.protect(self.launcher.pid)
            try:
                status = self._watch_to_the_end()
            finally:
                if self.launcher.poll() is None:
                    stop_tree(self.launcher.pid)
                guardian.dismiss()
        return self._finish(status)

    def _command(self) -> list[str]:
        options = self.options
        flags = (["-m"] if options.is_module else []) + (["--no-python"] if options.no_python else [])
        return [
            sys.executable, "-m", "torch.distributed.run", *options.torchrun_args, *flags, options.script,
            *options.script_args,
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        bootstrap = str(Path(__file__).resolve().parent.parent / "recorder" / "bootstrap")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (bootstrap, environment.get("PYTHONPATH"))))
        environment["DDPDOCTOR_RUN"] = str(self.folder)
        environment |= nccl_log_environment(environment, self.folder)
        if self.options.debug_level is not None:
            environment["TORCH_DISTRIBUTED_DEBUG"] = self.options.debug_level
        return environment

    def _watch_to_the_end(self) -> int:
        while (status := self.launcher.poll()) is None:
            self.watch.wait(LOOK_EVERY_S)
            self.watch.follow()
            self._note_restart()
            if self.signals:
                self._pass_on_signal()
            elif self.watch.evidence.closing_ns():
                self.watch.take_evidence()
                self.watch.evidence.acknowledge()
            elif self.hang is None and self._is_time(self.watch.suspicion()):
                self._examine()
        return status

    def _is_time(self, suspicion: Suspicion) -> bool:
        """Return whether to take evidence now: soon where somebody stands still, ever more rarely where all wait."""
        now_ns = time.monotonic_ns()
        if suspicion is Suspicion.STRONG:
            return now_ns >= max(self.last_look_ns + LOOK_AGAIN_S * 1e9, self.shown_until_ns)
        return suspicion is Suspicion.WEAK and now_ns >= max(self.next_look_ns, self.shown_until_ns)

    def _examine(self) -> None:
        """Take evidence and have it judged; stop the job where it is certain that it hangs."""
        began_ns = time.monotonic_ns()
        self.watch.take_evidence()
        self.last_look_ns = time.monotonic_ns()
        judgement = self.judge(self.folder, None)
        if note_machine(self.folder, judgement):
            judgement = self.judge(self.folder, None)
        found_any = any(finding.severity is Severity.ERROR for finding in judgement.findings)
        if not found_any or self.watch.has_moved_since(began_ns):
            self.next_look_ns = time.monotonic_ns() + int(self.patience_s * 1e9)
            self.patience_s = min(self.patience_s * 2, max(1.0, self.options.hang_timeout_s / 4))
            return
        if judgement.certain and self.options.on_hang == "kill":
            self.hang = judgement
            self.save_report(self._outcome(None))
            self._stop()
            return
        self.shown_until_ns = time.monotonic_ns() + int(self.options.hang_timeout_s * 1e9)
        found = tuple((finding.code, finding.ranks) for finding in judgement.findings)
        if found != self.shown:
            self.shown = found
            self.show(self._outcome(None, judgement))

    def _note_restart(self) -> None:
        """Judge an attempt that the launcher has given up, before the next one covers it."""
        if self.watch.agent.attempt > self.attempt:
            self.watch.save(ended=True, launcher_status=None)
            self.earlier.append(self.judge(self.folder, self.attempt))
            self.attempt = self.watch.agent.attempt

    def _pass_on_signal(self) -> None:
        """Save evidence within the grace of a scheduler, then let the launcher end the ranks as it would alone."""
        number, began_ns = self.signals[0]
        if self.watch.interrupted_by is None:
            self.watch.interrupted_by = number.name
            self.watch.take_evidence()
            self.watch.stopping_since_ns = time.monotonic_ns()
            self.watch.evidence.acknowledge()
            if number == signal.SIGINT:
                self._let_launcher_begin(began_ns)
            if not self.watch.evidence.has_closed_since(began_ns) and self.launcher.poll() is None:
                self.launcher.send_signal(number)
        elif len(self.signals) > 1:
            stop_tree(self.launcher.pid)
        self.watch.evidence.acknowledge()

    def _let_launcher_begin(self, began_ns: int) -> None:
        """Wait a moment: a Ctrl-C of the terminal has reached the launcher already; one from kill(1) has not."""
        limit = time.monotonic() + LAUNCHER_TAKES_OVER_S
        while time.monotonic() < limit and not self.watch.evidence.has_closed_since(began_ns):
            if self.launcher.poll() is not None:
                return
            time.sleep(0.02)

    def _stop(self) -> None:
        """Stop a job that hangs: SIGCONT and SIGTERM, SIGKILL after some seconds."""
        self.watch.stopping_since_ns = time.monotonic_ns()
        processes = proc.read_processes()
        below = [(p.pid, p.start_ticks) for p in proc.descendants(self.launcher.pid, processes)]
        for pid, _ in below:
            _send(pid, signal.SIGCONT)
        self.launcher.terminate()
        limit = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < limit and self.launcher.poll() is None:
            self.watch.evidence.acknowledge()
            time.sleep(0.05)
        for target in below:
            if is_same(*target):
                _send(target[0], signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(1.0)
        if self.launcher.poll() is None:
            self.launcher.kill()

    def _finish(self, status: int) -> Outcome:
        self.watch.follow(at_once=True)
        self.watch.evidence.release()
        if self.hang is None:
            self.watch.evidence.forget_kept()
            self.watch.save(ended=True, launcher_status=status)
        judgement = self.hang or self.judge(self.folder, None)
        if self.hang is None and note_machine(self.folder, judgement):
            judgement = self.judge(self.folder, None)
        _copy_back(self.folder, self.run_dir)
        outcome = self._outcome(status, judgement)
        self.save_report(outcome)
        return outcome

    def _outcome(self, status: int | None, judgement: Judgement | None = None) -> Outcome:
        hung = self.hang is not None
        exit_status = HUNG_STATUS if hung else _shell_status(status)
        if self.watch.interrupted_by == "SIGINT":
            exit_status = INTERRUPTED_STATUS
        found = judgement or self.hang or Judgement(findings=(), checks=(), certain=False)
        return Outcome(
            folder=self.folder, run_dir=self.run_dir, judgement=found, hung=hung, launcher_status=status,
            exit_status=exit_status, interrupted_by=self.watch.interrupted_by, earlier=tuple(self.earlier),
            started_at=self.started_at, ended_at=_now(),
        )  # fmt: skip

    def _orphaned(self) -> None:
        _copy_back(self.folder, self.run_dir)

    @contextlib.contextmanager
    def _handling_signals(self) -> Any:
        def note(number: int, _frame: object) -> None:
            self.signals.append((signal.Signals(number), time.monotonic_ns()))

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _shell_status(status: int | None) -> int:
    if status is None:
        return 0
    return status if status >= 0 else 128 - status


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _choose_folder(run_dir: Path) -> Path:
    """Return where recorders write: the run folder, or a folder of this host's where that one is shared."""
    if _file_system(run_dir) not in SHARED_FILE_SYSTEMS:
        return run_dir
    return Path(tempfile.mkdtemp(prefix="ddpdoctor-"))


def _file_system(path: Path) -> str:
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, fs, *_ = line.split()
            if (path.is_relative_to(mount)) and len(mount) >= len(best):
                best, kind = mount, fs
    return kind.removeprefix("fuse.")


def _copy_back(folder: Path, run_dir: Path) -> None:
    if folder != run_dir:
        with contextlib.suppress(OSError):
            shutil.copytree(folder, run_dir, dirs_exist_ok=True)


def write_run_file(folder: Path, options: WrapOptions, started_at: str, launched_ns: int) -> None:
    """Write run.json: what was started, when and how."""
    level = options.debug_level or os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    run = {
        "format": RUN_FORMAT,
        "version": RUN_VERSION,
        "command": hide_secrets(options.command),
        "started_at": started_at,
        "launched_ns": launched_ns,
        "hang_timeout_s": options.hang_timeout_s,
        "debug_level": level.upper(),
        "host": socket.gethostname(),
        "torch_version": _torch_version(),
        "environment": {name: os.environ[name] for name in STORED_VARIABLES if name in os.environ},
        **launch_shape(options.torchrun_args),
    }
    (folder / "run.json").write_text(json.dumps(run, indent=1))


def launch_shape(torchrun_args: tuple[str, ...]) -> dict[str, int | None]:
    """Return nproc, nnodes and node_rank as far as the options say them in numbers."""
    values: dict[str, str] = {}
    for i, argument in enumerate(torchrun_args):
        name, sep, value = argument.partition("=")
        following = torchrun_args[i + 1] if i + 1 < len(torchrun_args) else ""
        values[name.replace("_", "-")] = value if sep else following
    numbers = {
        "nproc": values.get("--nproc-per-node", os.environ.get("PET_NPROC_PER_NODE", "")),
        "nnodes": values.get("--nnodes", os.environ.get("PET_NNODES", "1")).split(":")[0],
        "node_rank": values.get("--node-rank", os.environ.get("PET_NODE_RANK", "")),
    }
    return {name: int(value) if value.isdigit() else None for name, value in numbers.items()}


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
