import pytest

from ddpdoctor.rules.hca_filter import parse_hca_filter

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
def test_takes_what_nccl_takes(text, taken):
    wanted = parse_hca_filter(text)
    assert tuple(device for device in DEVICES if wanted.takes(device, 1)) == taken


def test_a_device_is_named_by_its_whole_name_alone():
    assert parse_hca_filter("mlx5_1,mlx4").names("mlx5_1")
    assert not parse_hca_filter("mlx5_1").names("mlx5_10")
    assert not parse_hca_filter("^mlx5_1").names("mlx5_1")


def test_tokens_read_as_they_were_written():
    assert [str(token) for token in parse_hca_filter("^=mlx5_0,mlx5_1:2").tokens] == ["mlx5_0", "mlx5_1:2"]
