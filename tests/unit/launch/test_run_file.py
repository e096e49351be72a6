import pytest

from ddpdoctor.launch.folders.run_file import launch_shape


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        (("--nproc-per-node=3",), (3, 1, None)),
        (("--nproc_per_node", "4", "--nnodes", "2", "--node_rank", "1"), (4, 2, 1)),
        (("--nproc-per-node=gpu", "--nnodes=1:4"), (None, 1, None)),
        ((), (None, 1, None)),
    ],
)
def test_the_shape_of_a_job_is_read_from_torchruns_options(
    arguments: tuple[str, ...], shape: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PET_NPROC_PER_NODE", "PET_NNODES", "PET_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    found = launch_shape(arguments)
    assert (found["nproc"], found["nnodes"], found["node_rank"]) == shape
