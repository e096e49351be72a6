"""Turns NVML's answers into facts. Each query is independent: an unsupported one gives None."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.gpu.nvml_calls import Nvml, NvmlError
from ddpdoctor.collect.gpu.pci import read_on_bus, try_unlisted
from ddpdoctor.collect.gpu.processes import Kin, read_fabric_manager, sees_host_pids
from ddpdoctor.model.gpus import Gpu, GpuPair, GpuProcess, Gpus, NvLink
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpdoctor.collect.system import System

ABSENT = {
    "DRIVER_NOT_LOADED": "there is no NVIDIA driver here",
    "LIBRARY_NOT_FOUND": "the NVIDIA driver's library libnvidia-ml.so.1 is not here (a container needs --gpus)",
    "GPU_NOT_FOUND": "the NVIDIA driver has found no GPU",
}
"""Errors of nvmlInit that mean there is nothing to read."""
GONE = frozenset({"GPU_IS_LOST", "RESET_REQUIRED"})
"""Errors of any query that mean the device will not answer other queries either."""
HUNG = "it did not answer in time"
PERSISTENCED = "/run/nvidia-persistenced/socket"
# pynvml's NVML_P2P_CAPS_INDEX_READ is the tuple (0,) because of a stray comma.
P2P_READ = 0
NVLINK_ERRORS = (0, 1, 2, 3)
"""DL_REPLAY, DL_RECOVERY, DL_CRC_FLIT, DL_CRC_DATA in nvml.h."""
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
MAX_LINKS = 18
"""The value in nvml.h, for a pynvml without the constant."""
GPU_SENSOR = 0
SLOWDOWN_THRESHOLD = 1
PAGE_CAUSES = (0, 1)
"""Causes of retirement: multiple single-bit errors, and a double-bit error."""


def read_gpu_facts(nvml: Nvml, system: System) -> Iterator[Gpus]:
    """Yield the facts again and again, each time with more of them; raises ``NotRead`` if there is no driver.

    Before we query a device, we yield facts in which it did not answer in time. If it never answers, these facts are
    the last.
    """
    try:
        nvml.call("nvmlInit")
    except NvmlError as error:
        if error.name in ABSENT:
            raise NotRead(Unread(why=Why.ABSENT, reason=ABSENT[error.name])) from None
        yield replace(_frame(nvml, system), init_error=error.name)
        return
    yield from _read_devices(nvml, system, _frame(nvml, system))


def _frame(nvml: Nvml, system: System) -> Gpus:
    """Return the facts that do not belong to a single device."""
    return Gpus(
        driver=_text(nvml, "nvmlSystemGetDriverVersion"),
        cuda_driver=_cuda_version(_ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")),
        devices=(),
        pairs=(),
        persistenced=system.exists(PERSISTENCED) or system.exists(f"/var{PERSISTENCED}"),
        fabric_manager=read_fabric_manager(system),
        host_pids=sees_host_pids(system),
        on_bus=read_on_bus(system),
    )


def _cuda_version(number: int | None) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _read_devices(nvml: Nvml, system: System, gpus: Gpus) -> Iterator[Gpus]:
    handles: dict[int, Any] = {}
    kin = Kin(system)
    for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
        yield replace(gpus, devices=(*gpus.devices, _silent(index, HUNG)))
        try:
            handles[index] = nvml.call("nvmlDeviceGetHandleByIndex", index)
        except NvmlError as error:
            if error.name != "NO_PERMISSION":
                gpus = replace(gpus, devices=(*gpus.devices, _silent(index, _words(error))))
            continue
        gpus = replace(gpus, devices=(*gpus.devices, read_gpu(nvml, handles[index], index, kin)))
    gpus = replace(gpus, pairs=tuple(_read_pairs(nvml, handles)))
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
        known["nvlinks"] = _nvlinks(nvml, handle)
        known |= _fabric(nvml, handle)
    except NvmlError as error:
        return Gpu(index=index, **{**known, "error": _words(error)})
    return Gpu(index=index, **known)


def _words(error: NvmlError) -> str:
    """Return "GPU is lost" for GPU_IS_LOST."""
    return error.name.replace("_", " ").capitalize().replace("Gpu", "GPU")


def _ask(nvml: Nvml, function: str, *arguments: Any) -> Any:
    """Return an answer, or None for an error; raises ``NvmlError`` only if the device is gone."""
    return _or_none(nvml.call, function, *arguments)


def _fill(nvml: Nvml, function: str, handle: Any, struct: str) -> Any:
    """Return a struct that NVML filled in, or None for an error, like ``_ask``."""
    return _or_none(nvml.fill, function, handle, struct)


def _or_none(ask: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return ask(*arguments)
    except NvmlError as error:
        if error.name in GONE:
            raise
        return None


def _text(nvml: Nvml, function: str, *arguments: Any) -> str | None:
    found = _ask(nvml, function, *arguments)
    return None if found is None else str(found)


def _flag(answer: int | None) -> bool | None:
    return None if answer is None else bool(answer)


def _bus_id(info: Any) -> str:
    """Return "0000:1b:00.0" for NVML's "00000000:1B:00.0": sysfs writes domains with four digits."""
    if info is None:
        return ""
    text = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
    found = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+:[0-9a-f]+\.[0-9a-f])", text.strip().lower())
    return f"{int(found.group(1), 16):04x}:{found.group(2)}" if found else ""


def _memory_health(nvml: Nvml, handle: Any) -> dict[str, Any]:
    ecc = _ask(nvml, "nvmlDeviceGetEccMode", handle)
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", handle) or (None, None, None, None)
    pages = [_ask(nvml, "nvmlDeviceGetRetiredPages", handle, cause) for cause in PAGE_CAUSES]
    counted = [len(page) for page in pages if page is not None]
    sram = _fill(nvml, "nvmlDeviceGetSramEccErrorStatus", handle, "c_nvmlEccSramErrorStatus_v1_t")
    return {
        "vbios": _text(nvml, "nvmlDeviceGetVbiosVersion", handle),
        "ecc_enabled": None if ecc is None else bool(ecc[0]),
        "ecc_uncorrected_volatile": _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, UNCORRECTED, VOLATILE),
        "ecc_uncorrected_aggregate": _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, UNCORRECTED, AGGREGATE),
        "ecc_corrected_volatile": _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, CORRECTED, VOLATILE),
        "remapped_correctable": rows[0],
        "remapped_uncorrectable": rows[1],
        "remap_pending": _flag(rows[2]),
        "remap_failed": _flag(rows[3]),
        "retired_pages": sum(counted) if counted else None,
        "retired_pending": _flag(_ask(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle)),
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
        "persistence": _flag(_ask(nvml, "nvmlDeviceGetPersistenceMode", handle)),
        "mig_enabled": None if mig is None else bool(mig[0]),
        "compute_mode": None if mode is None else COMPUTE_MODES.get(mode, str(mode)),
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_used_bytes": None if memory is None else int(memory.used),
    }


def _processes(nvml: Nvml, handle: Any, kin: Kin) -> tuple[GpuProcess, ...] | None:
    """Return every process once; one that does compute and graphics counts as compute."""
    computing = _listed(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    drawing = _listed(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle)
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


def _listed(nvml: Nvml, function: str, handle: Any) -> list[Any] | None:
    found: list[Any] | None = _ask(nvml, f"{function}_v3", handle)
    if found is None:
        found = _ask(nvml, f"{function}_v2", handle)
    return found


def _nvlinks(nvml: Nvml, handle: Any) -> tuple[NvLink, ...]:
    """Return the device's links, which are those whose state it reports."""
    states = {
        link: _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        for link in range(nvml.constant("NVML_NVLINK_MAX_LINKS", MAX_LINKS))
    }
    return tuple(
        NvLink(index=link, active=bool(state), errors=_link_errors(nvml, handle, link))
        for link, state in states.items()
        if state is not None
    )


def _link_errors(nvml: Nvml, handle: Any, link: int) -> int | None:
    counts = [_ask(nvml, "nvmlDeviceGetNvLinkErrorCounter", handle, link, kind) for kind in NVLINK_ERRORS]
    counted = [count for count in counts if count is not None]
    return sum(counted) if counted else None


def _fabric(nvml: Nvml, handle: Any) -> dict[str, Any]:
    info = _fill(nvml, "nvmlDeviceGetGpuFabricInfoV", handle, "c_nvmlGpuFabricInfoV_t")
    if info is None:
        info = _fill(nvml, "nvmlDeviceGetGpuFabricInfo", handle, "c_nvmlGpuFabricInfo_t")
    if info is None:
        return {}
    status = "success" if info.status == 0 else nvml.error_name(info.status).replace("_", " ").lower()
    return {"fabric_state": FABRIC_STATES.get(info.state, str(info.state)), "fabric_status": status}


def _read_pairs(nvml: Nvml, handles: dict[int, Any]) -> Iterator[GpuPair]:
    for first, one in handles.items():
        for second, other in handles.items():
            if first >= second:
                continue
            try:
                ancestor = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other)
                status = _ask(nvml, "nvmlDeviceGetP2PStatus", one, other, P2P_READ)
            except NvmlError:  # one of the two is lost; its own facts say so
                continue
            yield GpuPair(
                first=first,
                second=second,
                ancestor=ANCESTORS.get(ancestor, "unknown"),
                p2p=None if status is None else P2P.get(status, "unknown"),
            )
