"""Limits, control groups, file systems, versions and the clock, read from recorded machines and from this one."""

import os
import sys
import time

import pytest

from ddpdoctor.collect.machine.limits import read_clock, read_limits
from ddpdoctor.collect.machine.software import cuda_of_wheel, read_software
from ddpdoctor.collect.machine.volumes import measure_writing, mount_of
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.system import System
from ddpdoctor.model.limits import Clock, Limit
from tests.machines import RecordedCalls, load_machine, shared_machine

GIB = 1 << 30
PLAN = ReadingPlan(sections=frozenset())


def limits(name, *states, **env):
    return read_limits(shared_machine(name, *states, env=env), PLAN)


def test_a_server():
    seen = limits("nvlink8")

    assert seen.nofile == Limit(soft=1048576, hard=1048576)
    assert seen.memlock == Limit(soft=None, hard=None)
    assert (seen.cpus_online, len(seen.cpus_allowed), seen.numa_nodes, seen.numa_balancing) == (224, 224, 2, 0)
    assert (seen.cpu_quota, seen.memory_limit_bytes, seen.pids_max, seen.oom_kills) == (None, None, None, None)
    assert (seen.memory_total_bytes, seen.memory_available_bytes) == (2113413120 * 1024, 2050000000 * 1024)
    assert seen.shm.volume.total_bytes == 1000 * GIB
    assert [(volume.path, volume.purpose, volume.fstype) for volume in seen.volumes] == [
        ("/tmp", "temporary files, cache", "ext4"),
        ("/raid/run", "working directory", "ext4"),
    ]
    assert (seen.somaxconn, seen.nproc_applies) == (4096, True)


def test_a_container_as_it_comes():
    seen = limits("container-nogpu")

    assert (seen.shm.volume.total_bytes, seen.shm.stale_files, seen.shm.loader_workers) == (64 << 20, (), 0)
    assert (seen.cpu_quota, seen.memory_limit_bytes, seen.pids_max) == (None, None, None)
    assert seen.nproc_applies is False


def test_the_limits_of_a_container():
    seen = limits("container-nogpu", "limited")

    assert seen.cpu_quota == 2.0
    assert (seen.memory_limit_bytes, seen.memory_used_bytes, seen.oom_kills) == (4 * GIB, GIB, 1)
    assert (seen.pids_max, seen.pids_current) == (100, 40)


def test_control_groups_of_version_1():
    seen = limits("container-nogpu", "cgroup-v1")

    assert seen.cpu_quota == 1.5
    assert (seen.memory_limit_bytes, seen.memory_used_bytes, seen.oom_kills) == (2 * GIB, GIB // 2, 3)
    assert seen.pids_max is None


def test_the_tightest_of_nested_groups(tmp_path):
    machine = load_machine("container-nogpu", tmp_path)
    job = {"cpu.max": "400000 100000", "memory.max": 8 * GIB, "memory.current": 7 * GIB, "pids.max": 500}
    step = {"cpu.max": "max 100000", "memory.max": 6 * GIB, "memory.current": GIB, "pids.max": 100, "pids.current": 2}
    task = {"cpu.max": "800000 100000", "memory.max": "max", "memory.current": GIB}
    for folder, files in {"job": {**job, "pids.current": 450}, "job/step": step, "job/step/task": task}.items():
        machine.path(f"/sys/fs/cgroup/{folder}").mkdir()
        for name, text in files.items():
            machine.path(f"/sys/fs/cgroup/{folder}/{name}").write_text(f"{text}\n")
    machine.path("/proc/self/cgroup").write_text("0::/job/step/task\n")

    seen = read_limits(machine, PLAN)

    assert seen.cpu_quota == 4.0
    # 1 GiB is left of the job's limit, 5 GiB of the step's.
    assert (seen.memory_limit_bytes, seen.memory_used_bytes) == (8 * GIB, 7 * GIB)
    assert (seen.pids_max, seen.pids_current) == (500, 450)


def test_leftovers_in_shared_memory(tmp_path):
    machine = load_machine("container-nogpu", tmp_path, "leftovers")
    # Fresh files may belong to a job that is just starting.
    assert read_limits(machine, PLAN).shm.stale_files == ()
    old = time.time() - 3600
    for name in machine.names("/dev/shm"):
        os.utime(machine.path(f"/dev/shm/{name}"), (old, old))

    shm = read_limits(machine, PLAN).shm

    assert shm.stale_files == ("/dev/shm/nccl-Xy12Zw", "/dev/shm/torch_900_123456_0")
    assert (shm.stale_bytes, shm.loader_workers) == (len("left\n") + len("gone\n"), 1)


def test_threads_of_a_user_and_small_limits():
    seen = limits("container-nogpu", "small")

    assert (seen.nofile, seen.nproc, seen.user_processes) == (
        Limit(soft=1024, hard=4096),
        Limit(soft=100, hard=200),
        90,
    )
    assert seen.volumes[0].free_bytes == 104857600
    assert (seen.somaxconn, seen.nproc_applies) == (128, True)


def test_tmpdir_is_looked_at_and_tmp_as_well(tmp_path):
    machine = load_machine("nvlink8", tmp_path, env={"TMPDIR": "/raid/run", "XDG_CACHE_HOME": "/home/user/none/yet"})
    assert [(volume.path, volume.purpose) for volume in read_limits(machine, PLAN).volumes] == [
        ("/raid/run", "temporary files, working directory"),
        ("/home/user", "cache, /tmp"),
    ]


def test_a_volume_that_cannot_be_asked_says_so(tmp_path):
    machine = load_machine("container-nogpu", tmp_path)
    machine.calls.errors["statvfs /tmp"] = "116 Stale file handle"
    (volume,) = read_limits(machine, PLAN).volumes
    assert (volume.error, volume.total_bytes) == ("Stale file handle", 0)


def test_mounts_with_spaces_and_one_over_another(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "mounts").write_text(
        "a / ext4 rw\nb /my\\040data xfs rw\nc /my\\040data nfs4 rw\nd /my overlay rw\n"
    )
    machine = System(root=tmp_path, env={})
    assert mount_of(machine, "/my data/x") == ("/my data", "nfs4")
    assert mount_of(machine, "/mydata") == ("/", "ext4")


def test_a_system_without_proc_and_sys(tmp_path):
    calls = RecordedCalls({"platform": "darwin", "hostname": "mac", "kernel": "24.1.0", "cpus": "0-9"})
    calls.answers["rlimit NOFILE"] = "256 -1"
    machine = System(root=tmp_path, env={}, calls=calls)

    seen = read_limits(machine, PLAN)

    assert (seen.nofile, seen.nproc, seen.shm) == (Limit(soft=256, hard=None), None, None)
    assert (seen.cpus_online, seen.somaxconn, seen.numa_nodes, seen.user_processes) == (10, None, 0, None)
    assert read_clock(machine, PLAN) == Clock(synchronized=None, offset_s=None)
    software = read_software(machine, PLAN)
    assert (software.platform, software.os_name, software.container, software.driver) == ("darwin", "", None, None)


def test_this_machine():
    seen = read_limits(System(), PLAN)

    assert seen.cpus_allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert seen.memory_total_bytes > seen.memory_available_bytes > 0
    assert seen.user_processes > 0
    assert seen.volumes[0].total_bytes > 0


def test_the_clock_of_this_machine_and_of_a_recorded_one(tmp_path):
    assert read_clock(System(), PLAN).synchronized in {True, False}
    assert read_clock(load_machine("nvlink8", tmp_path / "a"), PLAN).synchronized is True
    assert read_clock(load_machine("container-nogpu", tmp_path / "b"), PLAN).synchronized is False


def test_write_speed_is_measured_and_leaves_nothing(tmp_path):
    assert measure_writing(str(tmp_path), 16 << 20, limit_s=5.0) > 0
    assert list(tmp_path.iterdir()) == []
    assert measure_writing(str(tmp_path), 1 << 20) is None


def test_versions_of_a_server(tmp_path):
    software = read_software(load_machine("nvlink8", tmp_path), PLAN)

    assert (software.driver, software.driver_is_open) == ("580.95.05", True)
    assert software.nvml_libraries == ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05",)
    assert software.gpu_devices == tuple(f"/dev/nvidia{n}" for n in range(8))
    assert (software.os_name, software.kernel) == ("Ubuntu 24.04.3 LTS", "6.8.0-85-generic")
    assert (software.container, software.image, software.wsl, software.ofed) == (None, None, False, None)
    assert software.executable == sys.executable


def test_a_driver_that_is_not_the_open_one(tmp_path):
    software = read_software(load_machine("workstation2", tmp_path), PLAN)
    assert (software.driver, software.driver_is_open) == ("580.95.05", False)


@pytest.mark.parametrize(
    ("files", "env", "kind", "image"),
    [
        ({}, {}, None, None),
        ({"/.dockerenv": ""}, {}, "docker", None),
        ({"/run/.containerenv": 'engine="podman"\nimage="quay.io/a/b:1"\n'}, {}, "podman", "quay.io/a/b:1"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes", None),
        ({}, {"APPTAINER_CONTAINER": "/img/torch.sif"}, "apptainer", "/img/torch.sif"),
        ({}, {"SINGULARITY_CONTAINER": "/img/torch.sif"}, "apptainer", "/img/torch.sif"),
        ({}, {"container": "systemd-nspawn"}, "systemd-nspawn", None),
        ({"/proc/1/environ": "A=1\0container=lxc\0"}, {}, "lxc", None),
        ({"/proc/1/cgroup": "4:memory:/kubepods/besteffort/pod1"}, {}, "kubernetes", None),
        ({"/proc/1/cgroup": "0::/init.scope"}, {}, None, None),
        ({"/.dockerenv": ""}, {"NVIDIA_PYTORCH_VERSION": "25.06"}, "docker", "nvcr.io/nvidia/pytorch:25.06-py3"),
    ],
)
def test_kinds_of_containers(files, env, kind, image, tmp_path):
    for name, text in files.items():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    calls = RecordedCalls({"hostname": "h", "kernel": "6.8.0"})
    software = read_software(System(root=tmp_path, env=env, calls=calls), PLAN)
    assert (software.container, software.image) == (kind, image)


def test_wsl(tmp_path):
    calls = RecordedCalls({"hostname": "h", "kernel": "5.15.167.4-microsoft-standard-WSL2"})
    assert read_software(System(root=tmp_path, env={}, calls=calls), PLAN).wsl


def test_the_hosts_file_without_a_machines_own_lines(tmp_path):
    read = []
    for host, own in (("a1", "10.0.0.1 a1"), ("a2", "10.0.0.2 a2.cluster a2"), ("a3", "10.0.0.3 elsewhere")):
        (tmp_path / host / "etc").mkdir(parents=True)
        (tmp_path / host / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost # x\n{own}\n10.0.0.9 nas\n")
        machine = System(root=tmp_path / host, env={}, calls=RecordedCalls({"hostname": host, "kernel": "6"}))
        read.append(read_software(machine, PLAN))
    others = [set(one.hosts_lines) - set(one.hosts_own) for one in read]
    assert others[0] == others[1] < others[2]
    assert [(len(one.hosts_lines), len(one.hosts_own)) for one in read] == [(2, 1), (2, 1), (2, 0)]


@pytest.mark.parametrize(
    ("version", "requires", "cuda"),
    [
        ("2.13.0+cu130", [], "13.0"),
        ("2.6.0+cu118", [], "11.8"),
        ("2.13.0+cpu", ["cuda-toolkit[cublas]==13.0.2"], None),
        ("2.9.1", ["filelock", 'nvidia-cuda-runtime-cu12==12.8.90; platform_system == "Linux"'], "12.8"),
        ("2.13.0", ["cuda-toolkit[cublas,cudart]==13.0.2; platform_system == 'Linux'"], "13.0"),
        ("2.9.1", ["filelock"], None),
        ("2.9.1+rocm6.4", [], None),
    ],
)
def test_the_cuda_of_a_wheel(version, requires, cuda):
    assert cuda_of_wheel(version, requires) == cuda
