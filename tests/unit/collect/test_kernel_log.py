"""Errors of GPUs in the kernel's log, and why it cannot be read."""

import os
import shutil
import subprocess
import sys

import pytest

from ddpdoctor.collect.gpu import kernel_log
from ddpdoctor.collect.gpu.kernel_log import read_kernel_log, read_lines
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.system import System
from ddpdoctor.model.reading import NotRead, Why
from tests.machines import load_machine

PLAN = ReadingPlan(sections=frozenset({"kernel_log"}))


def test_errors_of_gpus_with_their_age(tmp_path):
    xids = read_kernel_log(load_machine("nvlink8", tmp_path, "xid"), PLAN).xids
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
    assert read_kernel_log(load_machine("nvlink8", tmp_path), PLAN).xids == ()


def test_without_uptime_there_is_no_age(tmp_path):
    system = load_machine("nvlink8", tmp_path, "xid")
    (tmp_path / "proc/uptime").unlink()
    assert {xid.age_s for xid in read_kernel_log(system, PLAN).xids} == {None}


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
    (xid,) = read_kernel_log(System(root=tmp_path), PLAN).xids
    assert (xid.bus_id, xid.code, xid.text) == ("0000:03:00.0", 14, "Channel 00000001")


def test_no_log_is_absence(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_kernel_log(System(root=tmp_path), PLAN)
    assert missing.value.unread.why is Why.ABSENT


def test_this_machines_own_log_is_read_without_waiting():
    refused = None
    try:
        assert all("\n" not in line.text for line in read_lines(System()))  # a text may be empty
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
        "from ddpdoctor.collect.gpu.kernel_log import read_lines\n"
        "from ddpdoctor.model.reading import NotRead\n"
        "try:\n    read_lines(System()); print('read')\n"
        "except NotRead as missing:\n    print(missing.unread.why.value, missing.unread.reason)\n"
    )
    drop = [setpriv, "--reuid", "65534", "--clear-groups", "--bounding-set", "-all", "--inh-caps", "-all"]
    ran = subprocess.run([*drop, sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    if ran.returncode != 0:
        pytest.skip(f"another user cannot run this Python: {ran.stderr[-200:]}")
    assert ran.stdout.startswith("denied ")
    assert kernel_log.GRANT in ran.stdout
