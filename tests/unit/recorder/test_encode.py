"""What is written without the module json is read back by it."""

import json

import pytest

from ddpdoctor.recorder.storage.ring_writing import to_json


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -5, 2**63, 1.5, -1e-300, "", 'a "quoted" \\ line\n', "tr\u00e4ger \U0001f3d6", "\udc80",
        [], [1, [None, "x"]], {}, {"k": "note", "frames": [{"f": "a.py", "l": 3, "u": True}]},
    ],
)  # fmt: skip
def test_a_value_is_read_back(value: object) -> None:
    assert json.loads(to_json(value)) == value
    assert to_json(value) == json.dumps(value, separators=(",", ":"))


def test_what_json_has_not() -> None:
    assert json.loads(to_json({1: (1, 2), "inf": float("inf"), "nan": float("nan")})) == {
        "1": [1, 2], "inf": None, "nan": None,
    }  # fmt: skip
    with pytest.raises(TypeError, match="set"):
        to_json({"x": {1}})
