"""A store of torch's in a process of its own."""

import pytest

from tests.torch_stores import serve_torch_store


@pytest.fixture
def backend():
    """Which of torch's two servers of a store."""
    return "libuv"


@pytest.fixture
def agent(backend):
    """A process that serves a store, as torchrun's agent does; yields it with its port."""
    with serve_torch_store(backend) as served:
        yield served
