"""What a machine says of its limits, load, firewall, kernel, names and variables."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from ddpdoctor.collect.blocked import LockLine, lock_of, read_lock_file, read_lock_files, read_locks
from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.firewall import read_firewall
from ddpdoctor.collect.kernel import GRANT, read_kernel_log, read_log
from ddpdoctor.collect.limits import (
    OwnTimes,
    find_busy,
    is_shared,
    measure_writing,
    mount_of,
    own_work,
    parse_cpu_times,
    read_clock,
    read_governors,
    read_limits,
    read_load,
    read_own_times,
    steal_share,
)
from ddpdoctor.collect.network import has_mesh_proxy, master_name, read_names
from ddpdoctor.collect.software import cuda_of_wheel, read_conf_files, read_software
from ddpdoctor.collect.system import ReadingPlan, System, SystemCalls
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.facts import LockFile, LockKind
from ddpdoctor.model.node import BusyCpu, Clock, Governor, Limit, Load
from ddpdoctor.model.reading import NotRead, Why
from tests.machines import RecordedCalls, load_machine, shared_machine

# Limits, control groups, file systems, versions and the clock, read from recorded machines and from this one.


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


# How busy a machine is with what is not ours, from /proc/stat as recorded and from this machine.


PLAN_LOAD = ReadingPlan(sections=frozenset({"load"}))
HEAD = "cpu  0 0 0 0 0 0 0 0 0 0\n"


def stat(*lines):
    return parse_cpu_times(HEAD + "".join(f"cpu{number} {line}\n" for number, line in enumerate(lines)) + "ctxt 1\n")


def shares(before, after, own=None):
    return {one.cpu: round(one.share, 2) for one in find_busy(before, after, 1.0, own or {})}


START = stat("1000 0 500 9000 50 1 2 0 0 0", "1000 0 500 9000 50 1 2 0 0 0")


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("1000 0 500 9100 50 1 2 0 0 0", 0),  # idle for the whole second
        ("1000 0 500 9000 150 1 2 0 0 0", 0),  # waiting for a disk computes nothing
        ("1097 0 500 9003 50 1 2 0 0 0", 0.97),
        ("1000 0 550 9050 50 1 2 0 0 0", 0.5),  # the kernel
        ("1000 40 500 9060 50 1 2 0 0 0", 0.4),  # niced
        ("1000 0 500 9070 50 1 2 30 0 0", 0.3),  # the hypervisor
        ("1003 0 500 9097 50 1 2 0 0 0", 0),  # what a daemon does in passing
    ],
)
def test_what_a_processor_did(line, share):
    assert shares(START, stat(line, "1000 0 500 9100 50 1 2 0 0 0")).get(0, 0) == share


def test_a_kernel_that_does_not_count_idle_time_to_the_tick_gives_no_more_than_all():
    assert shares(START, stat("1100 0 500 8999 50 1 2 0 0 0", "1000 0 500 9100 50 1 2 0 0 0")) == {0: 1.0}


def test_our_own_work_is_taken_off():
    busy = stat("1100 0 500 9000 50 1 2 0 0 0", "1050 0 500 9050 50 1 2 0 0 0")
    assert shares(START, busy, {0: 1.0, 1: 0.5}) == {}
    assert shares(START, busy, {1: 0.5}) == {0: 1.0}


def test_a_thread_of_ours_that_moved_leaves_nothing_behind():
    busy = stat("1060 0 500 9040 50 1 2 0 0 0", "1040 0 500 9060 50 1 2 0 0 0")
    assert shares(START, busy, {0: 1.0}) == {}


def test_work_is_counted_where_a_thread_was_seen_last_and_that_of_new_threads_as_a_whole():
    before = OwnTimes(seconds={"7/7": 5.0, "7/8": 1.0}, cpus={"7/7": 0, "7/8": 0})
    after = OwnTimes(seconds={"7/7": 5.25, "9/9": 0.5}, cpus={"7/7": 1, "9/9": 1})
    assert own_work(before, after) == {1: 0.75}


def test_what_the_hypervisor_took():
    assert steal_share(stat("60 0 20 9000 0 0 0 20 0 0").values()) == 0.2
    assert steal_share(stat("0 0 0 0 0 0 0 0 0 0").values()) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "this system does not report how busy its processors are"),
        (HEAD + "cpu0 0 0 0 0 0 0 0 0 0 0", "/proc/stat does not change here, as in a sandbox"),
    ],
)
def test_a_system_that_does_not_count(tmp_path, text, reason):
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc" / "stat").write_text(text)

    with pytest.raises(NotRead) as missing:
        read_load(System(root=tmp_path, calls=RecordedCalls()), PLAN_LOAD)

    assert (missing.value.unread.why, missing.value.unread.reason) == (Why.ABSENT, reason)


def test_governors(tmp_path):
    for cpu, name in enumerate(["powersave", "powersave", "performance"]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{name}\n")
        (folder / "scaling_driver").write_text("acpi-cpufreq\n")

    seen = read_governors(System(root=tmp_path, calls=RecordedCalls(answers={"cpus": "0-2"})))

    assert seen == (
        Governor(name="performance", driver="acpi-cpufreq", preference="", cpus=1),
        Governor(name="powersave", driver="acpi-cpufreq", preference="", cpus=2),
    )
    assert read_governors(System(root=tmp_path, calls=RecordedCalls(answers={"cpus": "3"}))) == ()


def test_what_is_read_can_be_sent():
    seen = Load(
        window_s=0.4, busy=(BusyCpu(cpu=3, share=0.5),), steal_share=None,
        governors=(Governor(name="performance", driver="", preference="", cpus=1),),
    )  # fmt: skip
    assert decode(Load, json.loads(json.dumps(encode(seen)))) == seen


READER = """
import json, sys
from ddpdoctor.collect.limits import own_pids
from ddpdoctor.collect.system import System
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(sorted(own_pids(System()))))
"""


@contextmanager
def python(*arguments):
    process = subprocess.Popen([sys.executable, *arguments], stdin=PIPE, stdout=PIPE, text=True)
    with process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_whose_work_is_ours():
    waiting = "print('ready', flush=True); input()"
    with python("-c", READER) as rank, python("-c", READER) as twin, python("-c", waiting) as other:
        ours = json.loads(rank.communicate("go\n")[0])
        twin.stdin.close()
    assert {rank.pid, twin.pid, os.getpid()} <= set(ours)
    assert other.pid not in ours


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_work_of_a_child_is_ours():
    before = read_own_times(System())
    with python("-c", "print('working', flush=True)\nwhile True: pass"):
        while sum(own_work(before, read_own_times(System())).values()) < 0.1:
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
def test_load_this_machine():
    seen = read_load(System(), PLAN_LOAD)

    assert seen.window_s > 0
    assert all(0 < one.share <= 1 and one.cpu < os.cpu_count() for one in seen.busy)


NFT_DROP = """table inet filter {
	set peers {
		type ipv4_addr
		elements = { 10.0.0.1, 10.0.0.2,
				10.0.0.3 }
	}

	chain input {
		type filter hook input priority filter; policy drop;
		ct state established,related accept
		ct state { established, related } accept
		iifname "lo" accept
		ip protocol icmp accept
		tcp dport { 22, 80,
				443 } counter packets 3 bytes 180 accept comment "web"
		ip saddr @peers accept
		counter packets 1 bytes 40 drop
	}

	chain forward {
		type filter hook forward priority filter; policy drop;
	}

	chain output {
		type filter hook output priority filter; policy accept;
	}
}
"""
FIREWALLD = """table inet firewalld {
	chain filter_INPUT {
		type filter hook input priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		jump filter_INPUT_ZONES
		reject with icmpx admin-prohibited
	}

	chain filter_INPUT_ZONES {
		iifname "eth0" goto filter_IN_public
		goto filter_IN_public
	}

	chain filter_IN_public {
		jump filter_IN_public_allow
		jump filter_INPUT_ZONES
	}

	chain filter_IN_public_allow {
		tcp dport 22 accept
		ip6 daddr fe80::/64 udp dport 546 accept
	}
}
"""
UFW = """*nat
:PREROUTING ACCEPT [0:0]
COMMIT
*filter
:INPUT DROP [3:120]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:ufw-before-input - [0:0]
:ufw-user-input - [0:0]
-A INPUT -j ufw-before-input
-A INPUT -j ufw-user-input
-A ufw-before-input -i lo -j ACCEPT
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -p icmp -m icmp --icmp-type 8 -j ACCEPT
-A ufw-user-input -p tcp -m tcp --dport 22 -j ACCEPT
COMMIT
"""
ORACLE = """*filter
:INPUT ACCEPT [0:0]
-A INPUT -m state --state RELATED,ESTABLISHED -j ACCEPT
-A INPUT -p tcp -m state --state NEW -m tcp --dport 22 -j ACCEPT
-A INPUT -j REJECT --reject-with icmp-host-prohibited
COMMIT
"""
DOCKER = """*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A DOCKER-USER -j RETURN
COMMIT
"""


def read(root, *, nft=None, iptables=None):
    answers = {"run nft list ruleset": nft, "run iptables-save": iptables}
    recorded = {name: text.replace("\n", "\\n") for name, text in answers.items() if text is not None}
    return read_firewall(System(root=root, env={}, calls=RecordedCalls(answers=recorded)))


def test_nft_with_policy_drop(tmp_path):
    (chain,) = read(tmp_path, nft=NFT_DROP)
    assert (chain.name, chain.refusal, chain.manager) == ("nft inet filter input", "policy drop", "")
    assert chain.accepts == ("tcp dport { 22, 80, 443 } accept", "ip saddr @peers accept")


def test_firewalld(tmp_path):
    (chain,) = read(tmp_path, nft=FIREWALLD)
    assert chain.refusal == "last rule: reject with icmpx admin-prohibited"
    assert (chain.manager, chain.accepts) == (
        "firewalld",
        ("tcp dport 22 accept", "ip6 daddr fe80::/64 udp dport 546 accept"),
    )


def test_ufw(tmp_path):
    (chain,) = read(tmp_path, iptables=UFW)
    assert (chain.name, chain.refusal, chain.manager) == ("iptables filter INPUT", "policy drop", "ufw")
    assert chain.accepts == ("-p tcp -m tcp --dport 22 -j ACCEPT",)


def test_a_cloud_image_that_rejects_at_the_end(tmp_path):
    (chain,) = read(tmp_path, iptables=ORACLE)
    assert chain.refusal == "last rule: -j REJECT --reject-with icmp-host-prohibited"
    assert chain.accepts == ("-p tcp -m state --state NEW -m tcp --dport 22 -j ACCEPT",)


@pytest.mark.parametrize(("nft", "iptables"), [("", DOCKER), ("", ""), ("", None), (None, DOCKER)])
def test_nothing_refuses(tmp_path, nft, iptables):
    assert read(tmp_path, nft=nft, iptables=iptables) == ()


def test_a_chain_that_both_tools_show_is_reported_once(tmp_path):
    nft = "table ip filter {\n\tchain INPUT {\n\t\ttype filter hook input priority filter; policy drop;\n\t}\n}\n"
    (chain,) = read(tmp_path, nft=nft, iptables=UFW)
    assert chain.name == "iptables filter INPUT"


# Errors of GPUs in the kernel's log, and why it cannot be read.


PLAN_KERNEL_LOG = ReadingPlan(sections=frozenset({"kernel_log"}))


def test_errors_of_gpus_with_their_age(tmp_path):
    xids = read_kernel_log(load_machine("nvlink8", tmp_path, "xid"), PLAN_KERNEL_LOG).xids
    assert [(xid.bus_id, xid.code) for xid in xids] == [
        ("0000:43:00.0", 79),
        ("0000:52:00.0", 63),
        ("0000:61:00.0", 31),
        ("0000:61:00.0", 31),
        ("0000:aa:00.0", 48),
    ]
    assert xids[0].age_s == pytest.approx(4000.52)
    assert xids[0].text == "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_a_quiet_log(tmp_path):
    assert read_kernel_log(load_machine("nvlink8", tmp_path), PLAN_KERNEL_LOG).xids == ()


def test_without_uptime_there_is_no_age(tmp_path):
    system = load_machine("nvlink8", tmp_path, "xid")
    (tmp_path / "proc/uptime").unlink()
    assert {xid.age_s for xid in read_kernel_log(system, PLAN_KERNEL_LOG).xids} == {None}


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (0000:03:00): 14, Channel 00000001",
        "NVRM: Xid (PCI:0000:03:00): 14, Channel 00000001",
        "NVRM: Xid (PCI:0000:03:00.0): 14, Channel 00000001",
        "nvidia 0000:03:00.0: NVRM: Xid (PCI:0000:03:00): 14, Channel 00000001",
    ],
)
def test_forms_of_the_line(tmp_path, line):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text(f"4,1,1000000,-;{line}\n")
    (xid,) = read_kernel_log(System(root=tmp_path), PLAN_KERNEL_LOG).xids
    assert (xid.bus_id, xid.code, xid.text) == ("0000:03:00.0", 14, "Channel 00000001")


def test_no_log_is_absence(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_kernel_log(System(root=tmp_path), PLAN_KERNEL_LOG)
    assert missing.value.unread.why is Why.ABSENT


def test_this_machines_own_log_is_read_without_waiting():
    refused = None
    try:
        assert all("\n" not in line.text for line in read_log(System()))  # a text may be empty
    except NotRead as missing:
        refused = missing.unread.why
    assert refused in {None, Why.DENIED, Why.ABSENT}


def test_a_log_that_is_denied_says_how_it_is_granted():
    """The kernel's own refusal: dmesg_restrict, to a process without CAP_SYSLOG."""
    setpriv = shutil.which("setpriv")
    restricted = System().text_or("/proc/sys/kernel/dmesg_restrict") == "1" and System().exists("/dev/kmsg")
    if os.geteuid() != 0 or setpriv is None or not restricted:
        pytest.skip("needs root, setpriv and kernel.dmesg_restrict=1")
    code = (
        "from ddpdoctor.collect.system import System\n"
        "from ddpdoctor.collect.kernel import read_log\n"
        "from ddpdoctor.model.reading import NotRead\n"
        "try:\n    read_log(System()); print('read')\n"
        "except NotRead as missing:\n    print(missing.unread.why.value, missing.unread.reason)\n"
    )
    drop = [setpriv, "--reuid", "65534", "--clear-groups", "--bounding-set", "-all", "--inh-caps", "-all"]
    ran = subprocess.run([*drop, sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    if ran.returncode != 0:
        pytest.skip(f"another user cannot run this Python: {ran.stderr[-200:]}")
    assert ran.stdout.startswith("denied ")
    assert GRANT in ran.stdout


PLAN_NAMES = ReadingPlan(sections=frozenset({"names"}))


def test_an_infiniband_node(tmp_path):
    names = read_names(load_machine("nvlink8", tmp_path), PLAN_NAMES)
    assert (names.hostname, names.fqdn) == ("dgx01", "dgx01.cluster.example")
    assert (names.own.addresses, names.own.error, names.own.timed_out) == (("10.0.0.11",), None, False)
    assert (names.master, names.head) == (None, None)
    assert names.reverse_s is not None


def test_a_desktop_has_the_name_that_ubuntu_gives_it(tmp_path):
    names = read_names(load_machine("workstation2", tmp_path), PLAN_NAMES)
    assert names.own.addresses == ("127.0.1.1",)
    assert names.reverse_s < 1


def test_the_master_and_the_head_are_looked_up(tmp_path):
    system = load_machine("nvlink8", tmp_path, env={"MASTER_ADDR": "dgx07", "MASTER_PORT": "29500"})
    names = read_names(system, ReadingPlan(sections=frozenset({"names"}), head="dgx01"))
    assert (names.master.name, names.master.addresses) == ("dgx07", ())
    assert names.master.error == "not recorded: resolve dgx07"
    assert names.head.addresses == ("10.0.0.11",)


@pytest.mark.parametrize(
    ("env", "master"),
    [
        ({}, None),
        ({"MASTER_ADDR": " node0 "}, "node0"),
        ({"MASTER_ADDR": "node0", "PET_RDZV_ENDPOINT": "node1:29400"}, "node0"),
        ({"PET_RDZV_ENDPOINT": "node1:29400"}, "node1"),
        ({"PET_RDZV_ENDPOINT": "[fd00::1]:29400"}, "fd00::1"),
        ({"PET_RDZV_ENDPOINT": ""}, None),
        ({"PET_MASTER_ADDR": "node2"}, "node2"),
    ],
)
def test_where_the_ranks_meet(env, master):
    assert master_name(env) == master


@pytest.mark.parametrize(
    ("endpoint", "host"), [("a", "a"), ("a:1", "a"), ("[::1]:1", "::1"), ("fd00::2", "fd00::2"), ("", None)]
)
def test_host_of_an_endpoint(endpoint, host):
    assert master_name({"PET_RDZV_ENDPOINT": endpoint}) == host


class DeadServer(SystemCalls):
    """Calls of which none answers that would ask a name server."""

    def __init__(self):
        self.never = threading.Event()

    def resolve(self, name):  # noqa: ARG002 - the protocol's
        self.never.wait()
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    def reverse(self, address):
        return self.resolve(address)[0]

    def fqdn(self):
        return self.resolve("")[0]


def test_a_dead_name_server_costs_two_seconds_once():
    calls = DeadServer()
    names = read_names(System(env={"MASTER_ADDR": "node0"}, calls=calls), PLAN_NAMES)
    assert (names.own.timed_out, names.own.error, names.fqdn) == (True, "no answer within 2 s", None)
    assert names.master.timed_out
    calls.never.set()


def test_names_this_machine():
    names = read_names(System(), PLAN_NAMES)
    assert names.hostname == socket.gethostname()
    assert bool(names.own.addresses) is (names.own.error is None)


# NCCL's files, read as NCCL reads them: src/misc/param.cc, and the releases run under strace.


PLAN_VARIABLES = ReadingPlan(sections=frozenset({"conf_files"}))


def machine(root, files, env=None, home="/home/ann"):
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    calls = RecordedCalls()
    calls.answers["home"] = home
    return System(root=root, env={"HOME": home, **(env or {})}, calls=calls)


def read_variables(root, files, **settings):
    return read_conf_files(machine(root, files, **settings), PLAN_VARIABLES)


def test_no_file_is_an_empty_tuple(tmp_path):
    assert read_variables(tmp_path, {}) == ()


def test_the_users_file_wins_over_the_machines_and_the_environment_over_both(tmp_path):
    files = {
        "/home/ann/.nccl.conf": "NCCL_DEBUG=INFO\nNCCL_ALGO=Ring\n",
        "/etc/nccl.conf": "NCCL_DEBUG=WARN\nNCCL_IB_HCA=mlx5_0\nNCCL_ALGO=Tree\n",
    }
    user, system = read_variables(tmp_path, files, env={"NCCL_ALGO": "Tree"})
    assert (user.path, system.path) == ("/home/ann/.nccl.conf", "/etc/nccl.conf")
    assert user.variables == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}
    assert user.hidden_by_env == ("NCCL_ALGO",)
    assert user.hidden_by_file == ()
    assert system.hidden_by_env == ("NCCL_ALGO",)
    assert system.hidden_by_file == ("NCCL_DEBUG", "NCCL_ALGO")
    assert system.lines == {"NCCL_DEBUG": 1, "NCCL_IB_HCA": 2, "NCCL_ALGO": 3}


def test_a_file_that_is_named_takes_the_place_of_the_users(tmp_path):
    files = {"/home/ann/.nccl.conf": "NCCL_DEBUG=INFO\n", "/opt/nccl.conf": "NCCL_DEBUG=WARN\n"}
    (file,) = read_variables(tmp_path, files, env={"NCCL_CONF_FILE": "/opt/nccl.conf"})
    assert (file.path, file.variables) == ("/opt/nccl.conf", {"NCCL_DEBUG": "WARN"})


def test_an_empty_name_of_a_file_counts_for_nothing(tmp_path):
    (file,) = read_variables(tmp_path, {"/home/ann/.nccl.conf": "NCCL_DEBUG=INFO\n"}, env={"NCCL_CONF_FILE": ""})
    assert file.path == "/home/ann/.nccl.conf"


def test_the_machines_file_by_name_is_read_once(tmp_path):
    (file,) = read_variables(
        tmp_path, {"/etc/nccl.conf": "NCCL_DEBUG=INFO\n"}, env={"NCCL_CONF_FILE": "/etc/nccl.conf"}
    )
    assert (file.hidden_by_file, file.unread) == ((), "")


def test_a_named_file_that_is_not_there_is_reported(tmp_path):
    (file,) = read_variables(tmp_path, {}, env={"NCCL_CONF_FILE": "/opt/nccl.conf"})
    assert (file.path, file.unread, file.variables) == ("/opt/nccl.conf", "there is no such file", {})


def test_a_folder_in_place_of_the_file_is_reported(tmp_path):
    (tmp_path / "etc/nccl.conf").mkdir(parents=True)
    (file,) = read_variables(tmp_path, {})
    assert file.unread == "is a directory"


def test_two_homes_are_both_read_each_with_the_versions_that_read_it(tmp_path):
    files = {"/tmp/home/.nccl.conf": "NCCL_DEBUG=INFO\n", "/root/.nccl.conf": "NCCL_DEBUG=WARN\n"}
    by_home, by_database = read_variables(tmp_path, files, env={"HOME": "/tmp/home/"}, home="/root")
    assert (by_home.path, by_home.since, by_home.until) == ("/tmp/home/.nccl.conf", "2.30.3", "")
    assert (by_database.path, by_database.since, by_database.until) == ("/root/.nccl.conf", "", "2.29.7")


def test_a_user_that_no_database_knows_has_the_home_of_the_shell(tmp_path):
    (file,) = read_variables(
        tmp_path, {"/home/jane/.nccl.conf": "NCCL_DEBUG=INFO\n"}, env={"HOME": "/home/jane"}, home=""
    )
    assert (file.path, file.since) == ("/home/jane/.nccl.conf", "2.30.3")


@pytest.mark.parametrize(
    ("text", "variables", "bad", "repeated"),
    [
        ("NCCL_DEBUG=INFO", {"NCCL_DEBUG": "INFO"}, (), ()),
        ("# NCCL_DEBUG=INFO\n\n  # more\n", {}, (), ()),
        ("NCCL_DEBUG=INFO # for now\n", {"NCCL_DEBUG": "INFO # for now"}, (), ()),
        ("NCCL_DEBUG=INFO\r\n", {"NCCL_DEBUG": "INFO\r"}, (), ()),
        ("NCCL_DEBUG=\n", {"NCCL_DEBUG": ""}, (), ()),
        ("NCCL_ALGO=allreduce:tree=x\n", {"NCCL_ALGO": "allreduce:tree=x"}, (), ()),
        ("NCCL_DEBUG INFO\n", {}, (1,), ()),
        ("export NCCL_DEBUG=INFO\n NCCL_ALGO=Ring\nNCCL_PROTO =LL\n=x\n", {}, (1, 2, 3, 4), ()),
        ("NCCL_DEBUG=INFO\nNCCL_DEBUG=WARN\n", {"NCCL_DEBUG": "INFO"}, (), (2,)),
        ('NCCL_IB_HCA="mlx5_0"\n', {"NCCL_IB_HCA": '"mlx5_0"'}, (), ()),
        ("API_TOKEN=hunter2\nNCCL_FOO=hunter2\n", {"API_TOKEN": "", "NCCL_FOO": ""}, (), ()),
        ("", {}, (), ()),
        ("\xff\xfe\x00", {}, (1,), ()),
    ],
)
def test_lines_are_taken_apart_as_nccl_does(tmp_path, text, variables, bad, repeated):
    (file,) = read_variables(tmp_path, {"/etc/nccl.conf": text})
    assert (file.variables, file.bad_lines, file.repeated_lines) == (variables, bad, repeated)


def test_this_machine_is_read(tmp_path):
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_DEBUG=WARN\n")
    files = read_conf_files(System(env={"NCCL_CONF_FILE": str(path)}, calls=SystemCalls()), PLAN_VARIABLES)
    assert files[0].variables == {"NCCL_DEBUG": "WARN"}


# What is seen of a lock file: its age, who has it open or locked, and whom it names.


NOBODY: frozenset[int] = frozenset()
ENDED = 2**22 + 1
"""Above the greatest number that Linux gives to a process."""


def test_a_file_that_nobody_has_open_says_how_old_it_is(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{ENDED}\n{os.uname().nodename}\n")
    os.utime(lock, (0, os.stat(lock).st_mtime - 3600))  # noqa: PTH116 - as the collector reads it
    found = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
    assert (found.exists, found.holders, found.unseen) == (True, (), 0)
    assert (found.named_pid, found.named_lives) == (ENDED, False)
    assert found.age_s is not None
    assert 3600 <= found.age_s < 3700


def test_who_has_it_open_holds_it_unless_it_polls_itself(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w"):
        held = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
        polled = read_lock_file(str(lock), LockKind.MARKER, (), frozenset({os.getpid()}))
    assert [owner.pid for owner in held.holders] == [os.getpid()]
    assert polled.holders == ()


def test_a_lock_on_another_device_is_on_another_file_of_the_same_inode(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    seen = lock.stat()

    def is_held(device: int) -> bool:
        line = LockLine(number=1, waits=False, kind="flock", pid=os.getpid(), file=(device, seen.st_ino))
        return bool(read_lock_file(str(lock), LockKind.KERNEL, (line,), NOBODY).holders)

    assert [is_held(device) for device in (seen.st_dev, os.makedev(0, 9999), os.makedev(250, 9))] == [True, True, False]


def test_a_file_names_who_lives(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"pid: {os.getpid()}\n")
    found = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
    assert (found.named_pid, found.named_lives) == (os.getpid(), True)


@pytest.mark.parametrize("text", ["", "node0", "2024-01-01", "1732291200.25", "\x00\xff"])
def test_other_text_names_nobody_that_is_believed_to_live(text: str, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(text)
    assert read_lock_file(str(lock), LockKind.MARKER, (), NOBODY).named_pid is None


def test_a_process_of_another_host_may_live(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{ENDED}\nsome-other-host\n")
    found = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
    assert (found.named_pid, found.named_lives, found.named_host) == (ENDED, None, "some-other-host")


def test_a_lock_of_the_kernel_is_recognized_by_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.flock(f,fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = read_lock_files({1: {"lock": {"path": str(lock), "kind": "kernel"}}}, read_locks())
        other.communicate()
    assert [owner.pid for owner in found[1].holders] == [other.pid]
    with lock.open("w") as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_is_gone_is_said_to_be_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    assert read_lock_file(path, LockKind.MARKER, (), NOBODY) == LockFile(path=path, kind=LockKind.MARKER, exists=False)


def test_a_device_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert read_lock_file(str(tmp_path / "lock"), LockKind.OWN_LOOP, (), NOBODY).named_pid is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({}, (None, LockKind.KERNEL)),
        ({"lock": {"path": "/x", "kind": "marker"}}, ("/x", LockKind.MARKER)),
        ({"lock": {"path": "/x", "kind": "new"}}, ("/x", LockKind.KERNEL)),
        ({"lock": {"path": 7}}, (None, LockKind.KERNEL)),
        ({"lock_path": "/x"}, ("/x", LockKind.KERNEL)),
    ],
)
def test_an_answer_says_what_is_polled_for(answer: dict[str, object], expected: tuple[str | None, LockKind]) -> None:
    assert lock_of(answer) == expected


MOUNTS = """\
disk / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
bucket /home/me/s3 fuse.s3fs rw 0 0
server:/a /my\\040data fuse.ceph rw 0 0
short
"""


def test_a_path_is_shared_if_its_deepest_mount_is(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "mounts").write_text(MOUNTS)
    paths = ("/tmp/x", "/home/me/x", "/home/me/s3/x", "/my data/x")
    assert [is_shared(Path(path), System(root=tmp_path)) for path in paths] == [False, True, False, True]


# Istio's proxy is seen by the sockets that it listens on, from any container of the pod.


@pytest.mark.parametrize(("states", "seen"), [((), False), (("istio",), True)])
def test_recorded(tmp_path, states, seen):
    assert has_mesh_proxy(load_machine("k8s-pod", tmp_path, *states)) is seen


def test_one_port_alone_is_somebody_else(tmp_path):
    system = load_machine("k8s-pod", tmp_path, "istio")
    table = system.path("/proc/net/tcp")
    table.write_text("\n".join(table.read_text().splitlines()[:2]))
    assert not has_mesh_proxy(system)


def test_no_proc(tmp_path):
    assert not has_mesh_proxy(System(root=tmp_path))


def test_sockets_of_ipv6_count(tmp_path):
    system = load_machine("k8s-pod", tmp_path, "istio")
    table = system.path("/proc/net/tcp")
    table.rename(table.with_name("tcp6"))
    assert has_mesh_proxy(system)


def test_real_sockets():
    assert not has_mesh_proxy(System())
    with socket.create_server(("127.0.0.1", 15001)), socket.create_server(("127.0.0.1", 15006)):
        assert has_mesh_proxy(System())


def test_answers_and_errors():
    def fail():
        raise OSError(-2, "Name or service not known")

    replies = ask_side_by_side({"good": lambda: 7, "bad": fail}, 60.0)
    assert (replies["good"].value, replies["good"].timed_out) == (7, False)
    assert replies["bad"].error.strerror == "Name or service not known"


def test_what_hangs_is_left_and_the_rest_has_answered():
    forever = threading.Event()
    replies = ask_side_by_side({"hangs": forever.wait, "too": forever.wait, "good": lambda: True}, 1.0)
    assert [(name, reply.timed_out) for name, reply in replies.items()] == [
        ("hangs", True),
        ("too", True),
        ("good", False),
    ]
    assert replies["hangs"].duration_s >= 0.9
    forever.set()


def test_a_defect_is_raised():
    with pytest.raises(ZeroDivisionError):
        ask_side_by_side({"defect": lambda: 1 // 0}, 5.0)
