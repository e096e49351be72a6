/* Stands in for NVIDIA's libnvidia-ml.so.1: two GPUs, laid out as nvml.h lays them out, so that pynvml, ctypes and the
   child process are the real ones. FAKE_NVML in the environment: "mismatch" refuses to start, "unloaded" has no driver,
   "hang" never returns from the second GPU, "lost" has lost it, "dead" never starts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, MISMATCH = 18 };
typedef struct { int index; } Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique, state, health; } Fabric;
typedef struct { unsigned version; unsigned long long counters[11]; unsigned exceeded; } Sram;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static Device devices[2] = {{0}, {1}};
static int is(const char *state) { const char *set = getenv("FAKE_NVML"); return set && !strcmp(set, state); }

int nvmlInitWithFlags(unsigned flags) {
    if (is("dead")) for (;;) pause();
    return is("mismatch") ? MISMATCH : is("unloaded") ? DRIVER_NOT_LOADED : SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.95.05"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index == 1 && is("lost")) return GPU_IS_LOST;
    if (index == 1 && is("hang")) for (;;) pause();
    *device = &devices[index];
    return SUCCESS;
}
int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
    snprintf(text, size, "GPU-%d0000000-0000-4000-8000-000000000000", device->index);
    return SUCCESS;
}
int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
    snprintf(text, size, "NVIDIA H100 80GB HBM3");
    return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%s:00.0", device->index ? "43" : "1B");
    return SUCCESS;
}
int nvmlDeviceGetEccMode(Device *device, unsigned *now, unsigned *later) { *now = *later = 1; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(Device *device, unsigned type, unsigned counter, unsigned long long *count) {
    *count = type == 1 && device->index == 1 ? 3 : 0;
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(Device *device, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
    *c = 0; *u = 1; *pending = device->index; *failed = 0;
    return SUCCESS;
}
int nvmlDeviceGetSramEccErrorStatus(Device *device, Sram *status) {
    if (status->version != 0x1000068) return NOT_SUPPORTED;
    status->exceeded = device->index;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory *memory) {
    if (memory->version != 0x02000028) return NOT_SUPPORTED;
    memory->total = 80ull << 30; memory->used = 4ull << 20;
    return SUCCESS;
}
int nvmlDeviceGetGpuFabricInfoV(Device *device, Fabric *fabric) {
    if (fabric->version != 0x02000024) return NOT_SUPPORTED;
    fabric->state = 3; fabric->status = SUCCESS;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *active) {
    if (link >= 18) return NOT_SUPPORTED;
    *active = !(device->index == 1 && link == 7);
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes) {
    if (!processes) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    processes[0] = (Process){.pid = getppid(), .used = 600ull << 20};
    return SUCCESS;
}
int nvmlDeviceGetTopologyCommonAncestor(Device *one, Device *other, unsigned *level) { *level = 40; return SUCCESS; }
int nvmlDeviceGetP2PStatus(Device *one, Device *other, unsigned what, unsigned *status) {
    *status = what == 0 ? 0 : 5;
    return SUCCESS;
}
