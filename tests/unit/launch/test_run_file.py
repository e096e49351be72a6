import pytest

from ddpdoctor.launch.command.torchrun_nodes import TorchrunSettings
from ddpdoctor.launch.folders.run_file import launch_shape


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        (("--nproc-per-node=3",), (3, 1, None)),
        (("--nproc_per_node", "4", "--nnodes", "2", "--node_rank", "1"), (4, 2, 1)),
        (("--nproc-per-node=gpu", "--nnodes=1:4"), (None, 1, None)),
        (("--nproc-per-node", "²", "--nnodes=²", "--node-rank", "x"), (None, None, None)),
        (("--tee=3", "--rdzv-id", "--nnodes", "--nnodes", "2"), (None, 2, None)),
        ((), (None, 1, None)),
    ],
)
def test_the_shape_of_a_job_is_read_from_torchruns_options(
    arguments: tuple[str, ...], shape: tuple[int | None, ...]
) -> None:
    found = launch_shape(TorchrunSettings(arguments, {}))
    assert (found["nproc"], found["nnodes"], found["node_rank"]) == shape
