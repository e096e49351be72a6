"""What the readers make of recorded machines: the facts of a healthy one whole, and what each of its states changes."""

import difflib
import sys
from dataclasses import replace

from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.collect.kernel import read_kernel_log, read_pci
from ddpdoctor.collect.limits import read_clock, read_limits
from ddpdoctor.collect.network import read_names, read_network, read_rdma
from ddpdoctor.collect.software import read_conf_files, read_software
from ddpdoctor.collect.system import ReadingPlan
from ddpdoctor.model.reading import NotRead
from tests.golden import Cases, outline
from tests.machines import shared_machine
from tests.nvml import load_nvml

CASES = Cases(__name__)
test_kept = CASES.test()
PLAN = ReadingPlan(sections=frozenset())
READERS = (read_limits, read_clock, read_software, read_kernel_log, read_names, read_conf_files, read_network, read_pci)


def facts(name, *states, **env):
    """Return the facts of a machine as lines. How long an answer took, and what is this Python's, is left out."""
    system = shared_machine(name, *states, env=env)
    found = {}
    for read in (*READERS, read_rdma):
        try:
            more = (lambda _seconds: None,) if read is read_rdma else ()
            found[read.__name__.removeprefix("read_")] = read(system, PLAN, *more)
        except NotRead as missing:
            found[read.__name__.removeprefix("read_")] = missing.unread
    names = found["names"]
    found["names"] = replace(names, own=replace(names.own, duration_s=0.0), reverse_s=names.reverse_s and 0.0)
    software = found["software"]
    found["software"] = replace(software, executable=software.executable == sys.executable, python="")
    return outline(found).split("\n")


def changes(name, states):
    healthy = facts(name)
    return {state: _changed(healthy, facts(name, state)) for state in states}


def _changed(before, after):
    """Return lines that are not in both, of those that take the place of another one only the words that differ."""
    told = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "replace" and b - a == d - c:
            told += [_words(old, new) for old, new in zip(before[a:b], after[c:d], strict=True)]
        elif kind != "equal":
            told += [f"- {line.strip()}" for line in before[a:b]] + [f"+ {line.strip()}" for line in after[c:d]]
    return "\n".join(told)


def _words(old, new):
    old, new = old.split(), new.split()
    head = " ".join(new[:2]) if old[:2] == new[:2] else ""
    return f"{head}: {' '.join(w for w in old if w not in new)} -> {' '.join(w for w in new if w not in old)}"


@CASES
def a_server_with_infiniband():
    states = (
        "acs", "driver-mismatch", "ib-down", "ib-flapped", "ib-no-manager", "ib-one-lane", "iommu", "kept-gpu",
        "memlock-low", "no-peermem", "not-root", "numa-lost", "pcie-narrow", "pcie-old-speed", "pod", "stuck",
        "uverbs-denied", "uverbs-missing", "xid",
    )  # fmt: skip
    return "\n".join(facts("nvlink8")), changes("nvlink8", states)


@CASES
def the_same_with_roce():
    return _changed(facts("nvlink8"), facts("roce8")), changes("roce8", ("no-ipv4", "shifted"))


@CASES
def a_desktop():
    return "\n".join(facts("workstation2"))


@CASES
def a_container_and_its_control_groups():
    states = ("limited", "cgroup-v1", "small", "leftovers")
    return "\n".join(facts("container-nogpu")), changes("container-nogpu", states)


def gpus(machine, *states, files=()):
    """Return the last facts, which are all that can be known."""
    *_, last = read_gpu_facts(load_nvml(machine, *states), shared_machine(machine, *files))
    return outline(last).split("\n")


@CASES
def gpus_of_a_server():
    healthy = gpus("nvlink8")
    states = (
        "lost", "lost-on-the-way", "mismatch", "one-fewer", "ecc-uncorrected", "ecc-off", "ecc-corrected",
        "remap-pending", "remap-failed", "remapped", "retired-pending", "retired-many", "sram", "hw-slowdown",
        "power-brake", "sw-thermal", "power-cap", "old-driver", "hot", "power-limit", "app-clocks", "persistence-off",
        "mig", "prohibited", "exclusive", "leftover", "our-process", "nvlink-down", "fabric-in-progress",
        "fabric-failed", "p2p-off",
    )  # fmt: skip
    told = {state: _changed(healthy, gpus("nvlink8", state)) for state in states}
    told |= {file: _changed(healthy, gpus("nvlink8", files=(file,))) for file in ("pod", "kept-gpu")}
    both = gpus("nvlink8", "one-fewer", files=("kept-gpu",))
    return "\n".join(healthy[:21]), told, _changed(healthy, gpus("roce8")), _changed(healthy, both)


@CASES
def gpus_of_a_desktop():
    return "\n".join(gpus("workstation2"))
