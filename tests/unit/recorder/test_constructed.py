"""A launch of a trial has one setting from its start: what the script constructs gets it as an argument."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.tuning import constructed

ROWS = TensorDataset(torch.zeros(8, 1))


class Stream(IterableDataset):
    """Rows without an index."""

    def __iter__(self):
        return iter(ROWS)


@pytest.fixture
def loader_class(monkeypatch):
    """Return a DataLoader of its own, whose constructor may be changed."""
    monkeypatch.setattr(here, "is_rank", True)
    monkeypatch.setattr(constructed, "_loaders", [])
    return type("Loader", (DataLoader,), {"__init__": DataLoader.__init__})


def ddp_class(names):
    """Return a class with these arguments, of which an object knows what it was given."""
    kind = {}
    exec(f"def __init__(self, module, {', '.join(f'{name}=None' for name in names)}): self.given = locals()", kind)
    return type("Model", (), {"__init__": kind["__init__"]})


def given_to(kind, setting, **arguments):
    constructed.patch_ddp(kind, setting)
    given = kind("module", **arguments).given
    return {name: value for name, value in given.items() if name not in {"self", "module"}}


OLD = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
NEW = (*OLD, "bucket_cap_mb_list", "forward_sync_buffers")


@pytest.mark.parametrize(
    ("names", "setting", "changed"),
    [
        (OLD, "bucket_cap=524288", {"bucket_cap_mb": 0.5}),
        (NEW, "bucket_cap=524288", {"bucket_cap_mb": 0.5, "bucket_cap_mb_list": None}),
        (OLD, "buffers_off", {"broadcast_buffers": False}),
        (NEW, "buffers_off", {"broadcast_buffers": None, "forward_sync_buffers": False}),
        (NEW, "static_graph", {"static_graph": True, "find_unused_parameters": False}),
        (NEW, "find_unused_off", {"find_unused_parameters": False}),
        (NEW, "gradient_as_bucket_view", {"gradient_as_bucket_view": True}),
        (NEW, "base", {}),
        (NEW, "workers=2", {}),
    ],
)
def test_ddp_gets_the_setting_and_keeps_the_other_arguments(names, setting, changed):
    script = {"broadcast_buffers": True, "bucket_cap_mb": 10, "find_unused_parameters": True}
    assert given_to(ddp_class(names), setting, **script) == {**dict.fromkeys(names), **script, **changed}


def test_an_argument_that_is_given_by_its_place_is_changed_too():
    kind = ddp_class(OLD)
    constructed.patch_ddp(kind, "buffers_off")
    given = kind("module", "broadcast", 10).given
    assert (given["broadcast_buffers"], given["bucket_cap_mb"]) == (False, 10)


def test_this_torch_has_the_arguments():
    names = DDP.__init__.__code__.co_varnames
    for setting in ("bucket_cap=524288", "buffers_off", "static_graph", "find_unused_off", "gradient_as_bucket_view"):
        assert set(constructed._ddp_arguments(setting, names)) <= set(names)


def test_a_call_that_the_constructor_refuses_is_refused_as_ever():
    kind = ddp_class(OLD)
    constructed.patch_ddp(kind, "static_graph")
    with pytest.raises(TypeError, match="no_such"):
        kind("module", no_such=1)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2},
        {"batch_size": 2, "sampler": SequentialSampler(ROWS)},
        {"batch_sampler": BatchSampler(SequentialSampler(ROWS), 2, drop_last=False)},
        {"batch_size": 2, "num_workers": 1, "prefetch_factor": 4},
        {},
    ],
)
def test_loaders_of_several_batches_get_workers_that_stay(options, loader_class):
    constructed.patch_loader(loader_class, "workers=2")
    loader = loader_class(ROWS, **options)
    assert (loader.num_workers, loader.persistent_workers) == (2, True)
    assert loader.prefetch_factor == options.get("prefetch_factor", 2)
    assert constructed.why_without_effect("workers=2") == ""


def test_streams_and_single_batches_stay_as_they_are(loader_class):
    constructed.patch_loader(loader_class, "workers=2")
    assert [loader_class(data, batch_size=8).num_workers for data in (ROWS, Stream())] == [0, 0]
    assert "no DataLoader" in constructed.why_without_effect("workers=2")


def test_threads_that_the_script_sets_itself_are_noticed():
    present = torch.get_num_threads()
    assert constructed.why_without_effect(f"threads={present}") == ""
    assert f"the script sets {present} threads itself" in constructed.why_without_effect(f"threads={present + 1}")
