"""What tests of the recorder share."""

import pytest


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A process group over Gloo in which this process is the only rank."""
    torch = pytest.importorskip("torch")
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
