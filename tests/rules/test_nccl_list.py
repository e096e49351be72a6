import pytest

from ddpdoctor.rules.interface_choice import is_ignored, parse_gloo_names
from ddpdoctor.rules.nccl_list import parse_nccl_list

DEVICES = ("mlx5_0", "mlx5_1", "mlx5_10", "mlx4_0", "rdmap16s27")


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", DEVICES),
        ("mlx5", ("mlx5_0", "mlx5_1", "mlx5_10")),
        ("mlx5_1", ("mlx5_1", "mlx5_10")),
        ("=mlx5_1", ("mlx5_1",)),
        ("=mlx5_1,mlx5_0", ("mlx5_0", "mlx5_1")),
        ("=mlx5_0,=mlx5_1", ("mlx5_0",)),
        ("^mlx5_1", ("mlx5_0", "mlx4_0", "rdmap16s27")),
        ("^=mlx5_1", ("mlx5_0", "mlx5_10", "mlx4_0", "rdmap16s27")),
        ("^", ()),
        ("=", DEVICES),
        (",mlx5_0,", ("mlx5_0",)),
        ("mlx5_0:1", ("mlx5_0",)),
        ("mlx5_0:2", ()),
        ("=mlx5_0::0:0", ("mlx5_0",)),
        ("=mlx5_0:1:0:1,mlx5_1:2", ("mlx5_0",)),
        ("mlx5_0:one", ()),
        (" mlx5_0", ()),
        ("MLX5_0", ()),
        ("^=", ()),
    ],
)
def test_ports_that_nccl_takes(text, taken):
    wanted = parse_nccl_list(text)
    assert tuple(device for device in DEVICES if wanted.takes(device, 1)) == taken


def test_a_device_is_named_by_its_whole_name_alone():
    assert parse_nccl_list("mlx5_1,mlx4").names("mlx5_1")
    assert not parse_nccl_list("mlx5_1").names("mlx5_10")
    assert not parse_nccl_list("^mlx5_1").names("mlx5_1")


def test_entries_read_as_they_were_written():
    assert [str(token) for token in parse_nccl_list("^=mlx5_0,mlx5_1:2").entries] == ["mlx5_0", "mlx5_1:2"]


@pytest.mark.parametrize(
    ("text", "taken", "left"),
    [
        ("eth0", ["eth0", "eth01"], ["eth1", "lo"]),
        ("eth,ib", ["eth0", "ib3"], ["lo", "docker0"]),
        ("=eth0", ["eth0"], ["eth01", "eth"]),
        ("=eth0,eth1", ["eth0", "eth1"], ["eth11"]),
        ("^docker", ["eth0", "lo"], ["docker0", "docker_gwbridge"]),
        ("^docker,lo,virbr", ["eth0", "cni0", "flannel.1", "veth1", "tailscale0"], ["docker0", "lo", "virbr0"]),
        ("^=docker0", ["docker01", "eth0"], ["docker0"]),
        ("^docker0,^lo", ["lo", "eth0"], ["docker0"]),
        ("eth0:1", ["eth0", "eth0:1"], ["eth1"]),
        ("eth0,", ["eth0"], ["eth1"]),
        ("Eth0", [], ["eth0"]),
        ("^^lo", ["eth0", "lo"], []),
        ("==lo", [], ["lo", "lo0"]),
        ("", ["eth0", "lo"], []),
        (",", ["eth0"], []),
        ("^,", [], ["eth0"]),
    ],
)
def test_interfaces_that_nccl_takes(text, taken, left):
    wanted = parse_nccl_list(text)
    assert [wanted.takes(name) for name in (*taken, *left)] == [True] * len(taken) + [False] * len(left)


@pytest.mark.parametrize(
    ("text", "stray"),
    [("^docker0,^lo", ("^lo",)), ("=eth0,=eth1", ("=eth1",)), ("^docker,lo", ()), ("eth0", ()), ("^^lo", ("^lo",))],
)
def test_marks_count_once(text, stray):
    assert parse_nccl_list(text).marked == stray


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("eth0", ("eth0",)),
        ("eth0,eth1", ("eth0", "eth1")),
        ("eth0, eth1", ("eth0", " eth1")),
        ("eth0,", ("eth0",)),
        ("eth0,,lo", ("eth0", "", "lo")),
        ("^docker", ("^docker",)),
    ],
)
def test_what_gloo_takes(text, names):
    assert parse_gloo_names(text) == names


@pytest.mark.parametrize(("text", "ignored"), [("", True), ("e", True), ("^", True), ("lo", False)])
def test_what_both_ignore(text, ignored):
    assert is_ignored(text) is ignored
