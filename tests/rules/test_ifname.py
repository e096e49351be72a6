import pytest

from ddpdoctor.rules.ifname import is_ignored, parse_gloo_names, parse_nccl_names


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
        ("^^lo", ["eth0"], ["lo"]),
        ("==lo", ["lo"], ["lo0"]),
        ("", ["eth0", "lo"], []),
        (",", ["eth0"], []),
        ("^,", [], ["eth0"]),
    ],
)
def test_what_nccl_takes(text, taken, left):
    wanted = parse_nccl_names(text)
    assert [wanted.takes(name) for name in (*taken, *left)] == [True] * len(taken) + [False] * len(left)


@pytest.mark.parametrize(
    ("text", "stray"), [("^docker0,^lo", ("^lo",)), ("=eth0,=eth1", ("=eth1",)), ("^docker,lo", ()), ("eth0", ())]
)
def test_marks_count_once(text, stray):
    assert parse_nccl_names(text).stray_marks == stray


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
