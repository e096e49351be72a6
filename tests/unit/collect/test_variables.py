"""NCCL's files, read as NCCL reads them: src/misc/param.cc, and the releases run under strace."""

import pytest

from ddpdoctor.collect.machine.nccl_conf import read_conf_files
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.system import System, SystemCalls
from tests.machines import RecordedCalls

PLAN = ReadingPlan(sections=frozenset({"conf_files"}))


def machine(root, files, env=None, home="/home/ann"):
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    calls = RecordedCalls()
    calls.answers["home"] = home
    return System(root=root, env={"HOME": home, **(env or {})}, calls=calls)


def read(root, files, **settings):
    return read_conf_files(machine(root, files, **settings), PLAN)


def test_no_file_is_an_empty_tuple(tmp_path):
    assert read(tmp_path, {}) == ()


def test_the_users_file_wins_over_the_machines_and_the_environment_over_both(tmp_path):
    files = {
        "/home/ann/.nccl.conf": "NCCL_DEBUG=INFO\nNCCL_ALGO=Ring\n",
        "/etc/nccl.conf": "NCCL_DEBUG=WARN\nNCCL_IB_HCA=mlx5_0\nNCCL_ALGO=Tree\n",
    }
    user, system = read(tmp_path, files, env={"NCCL_ALGO": "Tree"})
    assert (user.path, system.path) == ("/home/ann/.nccl.conf", "/etc/nccl.conf")
    assert user.variables == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}
    assert user.hidden_by_env == ("NCCL_ALGO",)
    assert user.hidden_by_file == ()
    assert system.hidden_by_env == ("NCCL_ALGO",)
    assert system.hidden_by_file == ("NCCL_DEBUG", "NCCL_ALGO")
    assert system.lines == {"NCCL_DEBUG": 1, "NCCL_IB_HCA": 2, "NCCL_ALGO": 3}


def test_a_file_that_is_named_takes_the_place_of_the_users(tmp_path):
    files = {"/home/ann/.nccl.conf": "NCCL_DEBUG=INFO\n", "/opt/nccl.conf": "NCCL_DEBUG=WARN\n"}
    (file,) = read(tmp_path, files, env={"NCCL_CONF_FILE": "/opt/nccl.conf"})
    assert (file.path, file.variables) == ("/opt/nccl.conf", {"NCCL_DEBUG": "WARN"})


def test_an_empty_name_of_a_file_counts_for_nothing(tmp_path):
    (file,) = read(tmp_path, {"/home/ann/.nccl.conf": "NCCL_DEBUG=INFO\n"}, env={"NCCL_CONF_FILE": ""})
    assert file.path == "/home/ann/.nccl.conf"


def test_the_machines_file_by_name_is_read_once(tmp_path):
    (file,) = read(tmp_path, {"/etc/nccl.conf": "NCCL_DEBUG=INFO\n"}, env={"NCCL_CONF_FILE": "/etc/nccl.conf"})
    assert (file.hidden_by_file, file.unread) == ((), "")


def test_a_named_file_that_is_not_there_is_reported(tmp_path):
    (file,) = read(tmp_path, {}, env={"NCCL_CONF_FILE": "/opt/nccl.conf"})
    assert (file.path, file.unread, file.variables) == ("/opt/nccl.conf", "there is no such file", {})


def test_a_folder_in_place_of_the_file_is_reported(tmp_path):
    (tmp_path / "etc/nccl.conf").mkdir(parents=True)
    (file,) = read(tmp_path, {})
    assert file.unread == "is a directory"


def test_two_homes_are_both_read_each_with_the_versions_that_read_it(tmp_path):
    files = {"/tmp/home/.nccl.conf": "NCCL_DEBUG=INFO\n", "/root/.nccl.conf": "NCCL_DEBUG=WARN\n"}
    by_home, by_database = read(tmp_path, files, env={"HOME": "/tmp/home/"}, home="/root")
    assert (by_home.path, by_home.since, by_home.until) == ("/tmp/home/.nccl.conf", "2.30.3", "")
    assert (by_database.path, by_database.since, by_database.until) == ("/root/.nccl.conf", "", "2.29.7")


def test_a_user_that_no_database_knows_has_the_home_of_the_shell(tmp_path):
    (file,) = read(tmp_path, {"/home/jane/.nccl.conf": "NCCL_DEBUG=INFO\n"}, env={"HOME": "/home/jane"}, home="")
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
    (file,) = read(tmp_path, {"/etc/nccl.conf": text})
    assert (file.variables, file.bad_lines, file.repeated_lines) == (variables, bad, repeated)


def test_this_machine_is_read(tmp_path):
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_DEBUG=WARN\n")
    files = read_conf_files(System(env={"NCCL_CONF_FILE": str(path)}, calls=SystemCalls()), PLAN)
    assert files[0].variables == {"NCCL_DEBUG": "WARN"}
