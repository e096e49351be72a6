"""Where NCCL's warnings go: to the run folder, unless the user has said anything about them."""

import pytest

from ddpdoctor.collect.system import System
from ddpdoctor.launch.processes.starting import nccl_log_environment


def machine(root, env, *devices, conf=""):
    (root / "dev").mkdir(parents=True)
    for name in devices:
        (root / "dev" / name).touch()
    if conf:
        (root / "etc").mkdir()
        (root / "etc" / "nccl.conf").write_text(conf)
    return System(root=root, env=env)


@pytest.mark.parametrize("device", ["nvidiactl", "kfd"])
def test_it_writes_warnings_to_the_run_folder(device, tmp_path):
    run = tmp_path / "run%1"
    run.mkdir()
    found = nccl_log_environment({}, run, machine(tmp_path / "root", {}, device))
    assert found == {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{tmp_path}/run%%1/nccl/%h.%p.log"}
    assert (run / "nccl").is_dir()


USERS = {
    "no GPU": ({}, (), ""),
    "its own level": ({"NCCL_DEBUG": "INFO"}, ("nvidiactl",), ""),
    "its own file": ({"NCCL_DEBUG_FILE": "/tmp/x"}, ("nvidiactl",), ""),
    "a level in NCCL's file": ({}, ("nvidiactl",), "NCCL_DEBUG=INFO\n"),
}


@pytest.mark.parametrize("name", USERS)
def test_what_the_user_chose_stays(name, tmp_path):
    env, devices, conf = USERS[name]
    assert nccl_log_environment(env, tmp_path, machine(tmp_path / "root", env, *devices, conf=conf)) == {}
