from ddpdoctor.model.node import ConfFile
from ddpdoctor.rules.settings import find_setting
from tests.rules.environment.build import node, process

NAME = "NCCL_IB_HCA"


def conf(value, *, path="/etc/nccl.conf", by_env=(), by_file=()):
    return ConfFile(path=path, variables={NAME: value}, hidden_by_env=by_env, hidden_by_file=by_file, bad_lines=())


def find(*files, **variables):
    one = process(**variables)
    return find_setting(node(processes=(one,), conf_files=files), one, NAME)


def test_the_environment_wins_over_files():
    found = find(conf("mlx5_1"), NCCL_IB_HCA="mlx5_0")
    assert (str(found), found.removal) == ("NCCL_IB_HCA=mlx5_0", "unset NCCL_IB_HCA")


def test_a_file_counts_where_the_environment_says_nothing():
    found = find(conf("mlx5_1"))
    assert str(found) == "NCCL_IB_HCA=mlx5_1 in /etc/nccl.conf"
    assert found.removal == "remove NCCL_IB_HCA from /etc/nccl.conf"


def test_a_file_that_another_hides_does_not_count():
    assert find(conf("mlx5_1", by_file=(NAME,)), conf("mlx5_2", path="/root/.nccl.conf")).value == "mlx5_2"


def test_unset_and_empty_are_the_same():
    assert find() is None
    assert find(conf("mlx5_1", by_env=(NAME,)), NCCL_IB_HCA="") is None


def test_numbers_read_as_c_reads_them():
    assert find(NCCL_IB_HCA="0x3").number == 3
    assert [find(NCCL_IB_HCA=value).number for value in ("010", "16 # x", "1abc", "-1", "0")] == [8, 16, 1, -1, 0]
    assert find(NCCL_IB_HCA="three").number is None
