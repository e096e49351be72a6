"""What tests of the recorder share."""

import pytest

from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_writing import Ring


@pytest.fixture
def ring(tmp_path, monkeypatch):
    """The ring of a rank that this process writes."""
    made = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    monkeypatch.setattr(here, "ring", made)
    return made


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A process group over Gloo in which this process is the only rank."""
    torch = pytest.importorskip("torch")
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
