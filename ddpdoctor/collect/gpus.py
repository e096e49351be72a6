"""Reads NVIDIA's GPUs by NVML, in a child process, because a dead GPU can leave the caller in a sleep that never ends.

Each query is independent: an unsupported one gives None. With --deep, every GPU also gets some work in a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import sys
import time
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.bounded import ChildEnd, run_child
from ddpdoctor.collect.kernel import read_on_bus, try_unlisted
from ddpdoctor.collect.proc import read_process
from ddpdoctor.collect.software import NO_DRIVER, is_nvidia_here
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.launch import VARIABLE, read_visible
from ddpdoctor.model.node import Gpu, GpuPair, GpuProcess, Gpus, GpuTrial, GpuWork, NvLink, PeerCopy
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    Run = Callable[[tuple[str, ...], float], ChildEnd]

# The part of a cgroup path that names a Slurm job or a Kubernetes pod.
JOB = re.compile(r"/(job_\d+|slurmstepd.*?/job_\d+|[^/]*pod[0-9a-f]{8}[-_0-9a-f]{20,}[^/]*)(?:/|$)")
FABRIC_MANAGER = "nv-fabricmanage"  # the kernel cuts process names to 15 characters
# Errors of nvmlInit that mean there is nothing to read.
ABSENT = {
    "DRIVER_NOT_LOADED": "no NVIDIA driver found",
    "LIBRARY_NOT_FOUND": "the NVIDIA driver's library libnvidia-ml.so.1 is missing (a container needs --gpus)",
    "GPU_NOT_FOUND": "the NVIDIA driver has found no GPU",
}
GONE = frozenset({"GPU_IS_LOST", "RESET_REQUIRED"})  # the device will answer no other query either
HUNG = "it did not answer in time"
PERSISTENCED = "/run/nvidia-persistenced/socket"
P2P_READ = 0  # pynvml's NVML_P2P_CAPS_INDEX_READ is (0,) because of a stray comma
NVLINK_ERRORS = (0, 1, 2, 3)  # DL_REPLAY, DL_RECOVERY, DL_CRC_FLIT, DL_CRC_DATA in nvml.h
COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}
FABRIC_STATES = {0: "not-supported", 1: "not-started", 2: "in-progress", 3: "completed"}
ANCESTORS = {0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system"}
P2P = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by a registry key",
    5: "not supported",
}
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
SM_CLOCK = 1
MEMORY_V2 = 0x02000028
MAX_LINKS = 18  # the value in nvml.h, for a pynvml without the constant
GPU_SENSOR = 0
SLOWDOWN_THRESHOLD = 1
PAGE_CAUSES = (0, 1)  # causes of retirement: multiple single-bit errors, and a double-bit error
CHILD_LIMIT_S = 40.0  # our choice: without a persistence daemon, the first call wakes every GPU, for seconds each
COUNT_LIMIT_S = 20.0  # our choice: shorter, because a user waits for the commands that only count GPUs
WITHOUT_LIMIT_S = 1.0  # our choice: so long before its section's limit the child must end to count
UUIDS = "uuids"  # with this argument, the child prints only the GPUs' UUIDs
HANGS = "the NVIDIA driver or a GPU hangs. See `sudo dmesg | grep -E 'NVRM|Xid'`; reboot if `nvidia-smi` hangs too"
NO_DRIVER_ERRORS = {"DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND"}
MODULE = "ddpdoctor.collect.gpus"
PROBE = "ddpdoctor.probes.gpu_trial"
WORK_LIMIT_S = 60.0  # our choice: enough to import torch from a slow disk, create a context and work for seconds
COPIES_LIMIT_S = 120.0  # our choice: eight GPUs have 56 pairs, and each takes a fraction of a second


class NvmlError(Exception):
    """NVML returned an error."""

    @property
    def name(self) -> str:
        """NVML's name for it, such as "GPU_IS_LOST"."""
        return str(self)


class Nvml:
    """Wraps pynvml or a recording of it; all errors become ``NvmlError``."""

    def __init__(self, module: ModuleType | Any) -> None:
        self._module = module
        names = (name for name in dir(module) if name.startswith("NVML_ERROR_"))
        self._error_names = {getattr(module, name): name.removeprefix("NVML_ERROR_") for name in names}

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function; raises ``NvmlError``, also if this pynvml lacks the function."""
        called = getattr(self._module, function, None)
        if called is None:
            raise NvmlError("FUNCTION_NOT_FOUND")
        try:
            return called(*arguments)
        except self._module.NVMLError as error:
            raise NvmlError(self.error_name(error.value)) from error

    def fill(self, function: str, struct: str, *arguments: Any) -> Any:
        """Call a function that fills in a struct, and return the struct; raises ``NvmlError``."""
        made = getattr(self._module, struct, None)
        if made is None:
            raise NvmlError("FUNCTION_NOT_FOUND")
        filled = made()
        self.call(function, *arguments, ctypes.byref(filled))
        return filled

    def error_name(self, code: int) -> str:
        """Return "GPU_IS_LOST" for 15."""
        return self._error_names.get(code, f"ERROR_{code}")

    def constant(self, name: str, default: int) -> int:
        """Return a constant of the module, or the default if the module is too old to have it."""
        return int(getattr(self._module, name, default))


class Kin:
    """The processes of the job that this process belongs to."""

    def __init__(self, system: System) -> None:
        self._system = system
        pid = int((system.text_or("/proc/self/stat").split() or ["0"])[0])
        self._own = (pid, *self._above(pid))
        # Under a launcher, the ranks beside this one are children of the same parent.
        self._root = self._own[2:3] if "RANK" in system.env or "SLURM_PROCID" in system.env else self._own[1:2]
        self._job = self._job_of("self")

    def name(self, pid: int) -> str | None:
        return self._system.text_or(f"/proc/{pid}/comm") or None

    def ours(self, pid: int) -> bool:
        """Return whether a process belongs to this job: the same batch job, pod or launcher."""
        if pid in self._own or any(above in self._root for above in self._above(pid)):
            return True
        return self._job is not None and self._job_of(str(pid)) == self._job

    def _above(self, pid: int) -> Iterator[int]:
        for _ in range(64):
            process = read_process(pid, self._system.path("/proc"))
            if process is None or process.ppid <= 1:
                return
            pid = process.ppid
            yield pid

    def _job_of(self, pid: str) -> str | None:
        job = JOB.search(self._system.text_or(f"/proc/{pid}/cgroup"))
        return job.group(1).rpartition("/")[2] if job else None


def read_gpu_facts(nvml: Nvml, system: System) -> Iterator[Gpus]:
    """Yield the facts as they grow; raises ``NotRead`` without a driver.

    Before we query a device, we yield facts in which it did not answer in time: the last ones, if it never does.
    """
    init_error = None
    try:
        nvml.call("nvmlInit")
    except NvmlError as error:
        if error.name in ABSENT:
            raise NotRead(Unread(why=Why.ABSENT, reason=ABSENT[error.name])) from None
        init_error = error.name
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    host_pids = system.text_or("/proc/2/comm") == "kthreadd"  # a container does not see the host's processes
    names = (system.text_or(f"/proc/{pid}/comm") for pid in system.names("/proc") if pid.isdecimal())
    gpus = Gpus(
        driver=_ask_text(nvml, "nvmlSystemGetDriverVersion"),
        cuda_driver=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None, devices=(), pairs=(),
        persistenced=system.exists(PERSISTENCED) or system.exists(f"/var{PERSISTENCED}"),
        fabric_manager=any(name == FABRIC_MANAGER for name in names) or (False if host_pids else None),
        host_pids=host_pids, on_bus=read_on_bus(system), init_error=init_error,
    )  # fmt: skip
    if init_error is not None:
        yield gpus
        return
    handles: dict[int, Any] = {}
    kin = Kin(system)
    for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
        yield replace(gpus, devices=(*gpus.devices, _silent(index, HUNG)))
        try:
            handles[index] = nvml.call("nvmlDeviceGetHandleByIndex", index)
        except NvmlError as error:
            if error.name != "NO_PERMISSION":
                gpus = replace(gpus, devices=(*gpus.devices, _silent(index, _error_words(error))))
            continue
        gpus = replace(gpus, devices=(*gpus.devices, read_gpu(nvml, handles[index], index, kin)))
    pairs = []
    for (first, handle), (second, other) in combinations(handles.items(), 2):
        with contextlib.suppress(NvmlError):  # one of the two is lost; its own facts say so
            ancestor = ANCESTORS.get(_ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handle, other), "unknown")
            status = _ask(nvml, "nvmlDeviceGetP2PStatus", handle, other, P2P_READ)
            p2p = None if status is None else P2P.get(status, "unknown")
            pairs.append(GpuPair(first=first, second=second, ancestor=ancestor, p2p=p2p))
    gpus = replace(gpus, pairs=tuple(pairs))
    yield gpus
    yield replace(gpus, on_bus=try_unlisted(system, gpus.on_bus, {gpu.bus_id for gpu in gpus.devices}))


def _silent(index: int, error: str) -> Gpu:
    return Gpu(index=index, uuid="", name="", bus_id="", error=error)


def read_gpu(nvml: Nvml, handle: Any, index: int, kin: Kin) -> Gpu:
    """Return the facts of one GPU; if it is lost on the way, return what is known so far with the error."""
    known: dict[str, Any] = {"uuid": "", "name": "", "bus_id": ""}
    try:
        known["uuid"] = str(_ask(nvml, "nvmlDeviceGetUUID", handle) or "")
        known["name"] = str(_ask(nvml, "nvmlDeviceGetName", handle) or "")
        known["bus_id"] = _bus_id(_ask(nvml, "nvmlDeviceGetPciInfo", handle))
        for part in (_memory_health, _heat_and_clocks, _modes):
            known |= part(nvml, handle)
        known["processes"] = _processes(nvml, handle, kin)
        links = []
        for link in range(nvml.constant("NVML_NVLINK_MAX_LINKS", MAX_LINKS)):
            state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
            if state is not None:
                counts = [_ask(nvml, "nvmlDeviceGetNvLinkErrorCounter", handle, link, kind) for kind in NVLINK_ERRORS]
                counted = [count for count in counts if count is not None]
                links.append(NvLink(index=link, active=bool(state), errors=sum(counted) if counted else None))
        known["nvlinks"] = tuple(links)
        info = _ask(nvml, "nvmlDeviceGetGpuFabricInfoV", handle, struct="c_nvmlGpuFabricInfoV_t")
        if info is None:
            info = _ask(nvml, "nvmlDeviceGetGpuFabricInfo", handle, struct="c_nvmlGpuFabricInfo_t")
        if info is not None:
            status = "success" if info.status == 0 else nvml.error_name(info.status).replace("_", " ").lower()
            known |= {"fabric_state": FABRIC_STATES.get(info.state, str(info.state)), "fabric_status": status}
    except NvmlError as error:
        return Gpu(index=index, **{**known, "error": _error_words(error)})
    return Gpu(index=index, **known)


def _error_words(error: NvmlError) -> str:
    """Return "GPU is lost" for GPU_IS_LOST."""
    return error.name.replace("_", " ").capitalize().replace("Gpu", "GPU")


def _ask(nvml: Nvml, function: str, *arguments: Any, struct: str = "") -> Any:
    """Return an answer or the filled struct, or None for an error; raises ``NvmlError`` if the device is gone."""
    try:
        return nvml.fill(function, struct, *arguments) if struct else nvml.call(function, *arguments)
    except NvmlError as error:
        if error.name in GONE:
            raise
        return None


def _ask_text(nvml: Nvml, function: str, *arguments: Any) -> str | None:
    answer = _ask(nvml, function, *arguments)
    return None if answer is None else str(answer)


def _as_bool(answer: int | None) -> bool | None:
    return None if answer is None else bool(answer)


def _bus_id(info: Any) -> str:
    """Return "0000:1b:00.0" for NVML's "00000000:1B:00.0": sysfs writes domains with four digits."""
    if info is None:
        return ""
    text = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
    parts = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+:[0-9a-f]+\.[0-9a-f])", text.strip().lower())
    return f"{int(parts.group(1), 16):04x}:{parts.group(2)}" if parts else ""


def _memory_health(nvml: Nvml, handle: Any) -> dict[str, Any]:
    ecc = _ask(nvml, "nvmlDeviceGetEccMode", handle)
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", handle) or (None, None, None, None)
    pages = [_ask(nvml, "nvmlDeviceGetRetiredPages", handle, cause) for cause in PAGE_CAUSES]
    counted = [len(page) for page in pages if page is not None]
    sram = _ask(nvml, "nvmlDeviceGetSramEccErrorStatus", handle, struct="c_nvmlEccSramErrorStatus_v1_t")
    return {
        "vbios": _ask_text(nvml, "nvmlDeviceGetVbiosVersion", handle),
        "ecc_enabled": None if ecc is None else bool(ecc[0]),
        "ecc_uncorrected_volatile": _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, UNCORRECTED, VOLATILE),
        "ecc_uncorrected_aggregate": _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, UNCORRECTED, AGGREGATE),
        "ecc_corrected_volatile": _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, CORRECTED, VOLATILE),
        "remapped_correctable": rows[0],
        "remapped_uncorrectable": rows[1],
        "remap_pending": _as_bool(rows[2]),
        "remap_failed": _as_bool(rows[3]),
        "retired_pages": sum(counted) if counted else None,
        "retired_pending": _as_bool(_ask(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle)),
        "sram_threshold_exceeded": None if sram is None else bool(sram.bThresholdExceeded),
    }


def _heat_and_clocks(nvml: Nvml, handle: Any) -> dict[str, Any]:
    reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # drivers before 535 use the old name
        reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return {
        "clock_event_reasons": reasons,
        "temperature_c": _ask(nvml, "nvmlDeviceGetTemperature", handle, GPU_SENSOR),
        "slowdown_temperature_c": _ask(nvml, "nvmlDeviceGetTemperatureThreshold", handle, SLOWDOWN_THRESHOLD),
        "power_limit_mw": _ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle),
        "default_power_limit_mw": _ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle),
        "app_clock_sm_mhz": _ask(nvml, "nvmlDeviceGetApplicationsClock", handle, SM_CLOCK),
        "default_app_clock_sm_mhz": _ask(nvml, "nvmlDeviceGetDefaultApplicationsClock", handle, SM_CLOCK),
        "max_clock_sm_mhz": _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, SM_CLOCK),
    }


def _modes(nvml: Nvml, handle: Any) -> dict[str, Any]:
    mig = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    mode = _ask(nvml, "nvmlDeviceGetComputeMode", handle)
    # Version 2 does not count the driver's reserved memory as used.
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, nvml.constant("nvmlMemory_v2", MEMORY_V2))
    if memory is None:
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return {
        "persistence": _as_bool(_ask(nvml, "nvmlDeviceGetPersistenceMode", handle)),
        "mig_enabled": None if mig is None else bool(mig[0]),
        "compute_mode": None if mode is None else COMPUTE_MODES.get(mode, str(mode)),
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_used_bytes": None if memory is None else int(memory.used),
    }


def _processes(nvml: Nvml, handle: Any, kin: Kin) -> tuple[GpuProcess, ...] | None:
    """Return every process once; one that does compute and graphics counts as compute."""
    computing = _processes_on(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    drawing = _processes_on(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle)
    if computing is None and drawing is None:
        return None
    used: dict[int, int | None] = {}
    for process in (*(drawing or ()), *(computing or ())):
        used[process.pid] = max(filter(None, (used.get(process.pid), process.usedGpuMemory)), default=None)
    computes = {process.pid for process in computing or ()}
    return tuple(
        GpuProcess(pid=pid, name=kin.name(pid), used_bytes=size, ours=kin.ours(pid), graphics=pid not in computes)
        for pid, size in sorted(used.items())
    )


def _processes_on(nvml: Nvml, function: str, handle: Any) -> list[Any] | None:
    processes: list[Any] | None = _ask(nvml, f"{function}_v3", handle)
    if processes is None:
        processes = _ask(nvml, f"{function}_v2", handle)
    return processes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCount:
    """How many NVIDIA GPUs a job may use."""

    count: int = 0
    unknown: str = ""  # why the GPUs could not be counted although there is a driver


def read_gpus(system: System, plan: ReadingPlan) -> Gpus:
    """Return NVML's facts; raises ``NotRead`` without a driver or no answer at all."""
    limit_s = CHILD_LIMIT_S if plan.limit_s is None else min(CHILD_LIMIT_S, plan.limit_s - WITHOUT_LIMIT_S)
    if not is_nvidia_here(system):
        raise NotRead(NO_DRIVER)
    if not system.live:
        raise NotRead(Unread(why=Why.ABSENT, reason="a recorded machine has no NVML"))
    return gpus_of(run_child(MODULE, (), system.env, limit_s), limit_s)


def read_uuids(system: System, limit_s: float = COUNT_LIMIT_S) -> tuple[str, ...]:
    """Return the UUIDs of all GPUs in NVML's order; raises ``NotRead`` without a driver or no answer."""
    if not is_nvidia_here(system):
        raise NotRead(NO_DRIVER)
    said = _last_words(run_child(MODULE, (UUIDS,), system.env, limit_s), limit_s)
    return tuple(said[UUIDS])


def count_gpus(env: Mapping[str, str]) -> GpuCount:
    """Count the GPUs that ``CUDA_VISIBLE_DEVICES`` allows; a child asks NVML, because a dead GPU never answers."""
    visible = env.get(VARIABLE)
    if read_visible(visible, ()).on_purpose:
        return GpuCount()
    try:
        return GpuCount(count=len(read_visible(visible, read_uuids(System(env=env))).devices))
    except NotRead as missing:
        absent = missing.unread.why is Why.ABSENT
        return GpuCount(unknown="" if absent else missing.unread.reason)


def gpus_of(ended: ChildEnd, limit_s: float) -> Gpus:
    """Turn the child's output into facts: each line holds all facts so far, and the last line counts."""
    return decode(Gpus, _last_words(ended, limit_s))


def _last_words(ended: ChildEnd, limit_s: float) -> dict[str, Any]:
    if ended.records:
        said = ended.records[-1]
        if "absent" in said:
            raise NotRead(Unread(why=Why.ABSENT, reason=said["absent"]))
        return said
    if ended.status is None:
        reason = f"NVML did not answer within {limit_s:.0f} s: {HANGS}"
        raise NotRead(Unread(why=Why.TIMEOUT, reason=reason))
    raise NotRead(Unread(why=Why.ERROR, reason=f"NVML returned no answer: {ended.last_error}"))


def main(arguments: list[str]) -> None:
    """Print all facts so far again and again, one line each time, so that a hanging device costs only later facts."""
    try:
        import pynvml
    except ImportError as error:
        sys.exit(f"the package nvidia-ml-py cannot be imported: {error}")
    try:
        if arguments == [UUIDS]:
            nvml = Nvml(pynvml)
            try:
                nvml.call("nvmlInit")
                count = nvml.call("nvmlDeviceGetCount")
            except NvmlError as error:
                if error.name in NO_DRIVER_ERRORS:
                    raise NotRead(NO_DRIVER) from error
                sys.exit(f"it says {error.name}")
            uuids = [f"GPU {index}" for index in range(count)]  # if it cannot be read
            for index in range(count):
                with contextlib.suppress(NvmlError):
                    uuids[index] = str(nvml.call("nvmlDeviceGetUUID", nvml.call("nvmlDeviceGetHandleByIndex", index)))
            _print_facts({UUIDS: uuids})
            return
        for gpus in read_gpu_facts(Nvml(pynvml), System()):
            _print_facts(encode(gpus))
    except NotRead as missing:
        _print_facts({"absent": missing.unread.reason})


def _print_facts(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 - the parent reads it


def read_gpu_trial(system: System, plan: ReadingPlan) -> GpuTrial:
    """Return how every GPU did its work; raises ``NotRead`` without --deep or without GPUs."""
    if not plan.deep:
        raise NotRead(Unread(why=Why.NOT_ASKED, reason="GPUs are tested only with --deep"))
    if not is_nvidia_here(system) or not system.live:
        raise NotRead(NO_DRIVER)
    return try_gpus(lambda arguments, limit_s: run_child(PROBE, arguments, system.env, limit_s))


def try_gpus(run: Run) -> GpuTrial:
    """Try all GPUs in parallel, then the copies between them; if that hung or died, the pair after the last failed."""
    from concurrent.futures import ThreadPoolExecutor  # the child that asks NVML does not need it

    ended = run(("count",), WORK_LIMIT_S)
    counted = ended.records
    if not counted and ended.status is None:
        raise NotRead(Unread(why=Why.TIMEOUT, reason=f"torch did not count the GPUs within {WORK_LIMIT_S:.0f} s"))
    if not counted:
        raise NotRead(Unread(why=Why.ERROR, reason=f"torch could not count the GPUs: {ended.last_error}"))
    count = int(counted[0]["count"])
    if not count:
        raise NotRead(Unread(why=Why.ABSENT, reason="torch sees no GPU"))
    with ThreadPoolExecutor(max_workers=count, thread_name_prefix="ddpdoctor-trial") as pool:
        work = tuple(pool.map(lambda index: _work(run, index), range(count)))
    if count == 1 or not all(gpu.ok for gpu in work):
        return GpuTrial(work=work, copies=())
    ended = run(("copies",), COPIES_LIMIT_S)
    copies = [PeerCopy(**result) for result in ended.records]
    left = list(permutations(range(count), 2))[len(copies) :]
    if ended.status != 0 and left:
        what = "this copy was not done" if copies else "no copy was done"
        reason = f"{what} within {COPIES_LIMIT_S:.0f} s" if ended.status is None else ended.last_error
        copies.append(PeerCopy(source=left[0][0], target=left[0][1], ok=False, error=reason, gb_s=None))
    return GpuTrial(work=work, copies=tuple(copies))


def _work(run: Run, index: int) -> GpuWork:
    started = time.monotonic()
    ended = run(("work", f"cuda:{index}"), WORK_LIMIT_S)
    said = ended.records
    if said:
        return GpuWork(index=index, timed_out=False, **said[-1])
    is_late, seconds = ended.status is None, time.monotonic() - started
    error = f"no result within {WORK_LIMIT_S:.0f} s" if is_late else ended.last_error
    return GpuWork(index=index, ok=False, error=error, timed_out=is_late, seconds=seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
