"""What DDP was given is written small, and read back as it was."""

import hashlib

import torch

from ddpdoctor.collect.rank.notes import read_models, read_parameters, unpack
from ddpdoctor.recorder.training import ddp_constructor


def note(module, *, with_buffers=True, room=ddp_constructor.MAX_ROWS_BYTES):
    rows = ddp_constructor._rows(module, with_buffers)
    text = ddp_constructor._text(rows)
    return {
        "k": "ddp", "group": "0", "count": len(rows), "digest": hashlib.sha256(text).hexdigest()[:24],
        "rows": ddp_constructor._packed(rows, text, room), "frame": {"f": "train.py", "l": 7, "n": "main", "u": 1},
    }  # fmt: skip


def test_parameters_and_buffers_come_back_in_order():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module[0].bias.requires_grad = False
    (found,) = read_models([note(module)])
    assert [t.name for t in found.tensors] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    ]  # fmt: skip
    assert [(t.shape, t.dtype, t.requires_grad, t.is_buffer) for t in found.tensors[:2]] == [
        ((3, 2), "float32", True, False),
        ((3,), "float32", False, False),
    ]
    assert found.tensors[-1].is_buffer
    assert (found.count, found.site.line) == (7, 7)


def test_parameters_that_an_optimizer_trains_without_ddp_come_back_with_their_names():
    named = [(f"model.{name}", tensor) for name, tensor in torch.nn.Linear(2, 3).named_parameters()]
    notes = [{"k": "named", "rows": ddp_constructor.pack_names(named)}, {"k": "named", "rows": "!"}, {"k": "named"}]
    assert [(one.name, one.shape) for one in read_parameters(notes)] == [("model.weight", (3, 2)), ("model.bias", (3,))]
    many = [(f"layer.{hash(str(n))}.{n}", torch.zeros(1)) for n in range(8000)]
    assert len(ddp_constructor.pack_names(many)) <= ddp_constructor.MAX_ROWS_BYTES // 4


def test_what_ddp_passes_over_is_left_out():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module._ddp_params_and_buffers_to_ignore = ["0.weight"]
    (found,) = read_models([note(module, with_buffers=False)])
    assert [t.name for t in found.tensors] == ["0.bias", "1.weight", "1.bias"]


def test_a_lazy_layer_has_no_shape():
    (found,) = read_models([note(torch.nn.LazyLinear(3))])
    assert [t.shape for t in found.tensors] == [None, None]


def test_two_thousand_parameters_take_little_room():
    module = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(1000)])
    written = note(module)
    assert len(written["rows"]) < 16 * 1024
    assert len(read_models([written])[0].tensors) == 2000


def test_rows_without_room_are_cut_and_counted():
    (found,) = read_models([note(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(500)]), room=1500)])
    assert 0 < len(found.tensors) < found.count == 1000


def test_rows_are_written_once_for_equal_models():
    first = note(torch.nn.Linear(2, 2))
    again = {name: value for name, value in first.items() if name != "rows"}
    found = read_models([first, again])
    assert found[0].tensors == found[1].tensors != ()


def test_damaged_rows_are_none():
    assert unpack("not base64!") == unpack("AAAA") == unpack("") == ()
