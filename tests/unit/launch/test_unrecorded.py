"""Which Pythons keep the recorder out, and why."""

import pytest

from ddpdoctor.launch.watching.unrecorded import why_unrecorded

LOADED = {"DDPDOCTOR_RUN": "/run", "PYTHONPATH": "/x/ddpdoctor/recorder/bootstrap:/mine"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("python train.py", ""),
        ("python -u -X dev train.py -I", ""),
        ("python -W ignore -m pkg -S", ""),
        ("python -WI train.py", ""),
        ("python -c I", ""),
        ("python", ""),
        ("python -I train.py", "-I"),
        ("python -uE -m pkg", "-E"),
        ("python -X dev -S train.py", "-S"),
    ],
)
def test_options_that_switch_start_up_hooks_off_are_named(line, reason):
    why = why_unrecorded(line.split(), LOADED)
    assert (reason in why) if reason else not why


@pytest.mark.parametrize("lacks", ["DDPDOCTOR_RUN", "PYTHONPATH"])
def test_an_environment_of_its_own_is_named(lacks):
    environment = {name: value for name, value in LOADED.items() if name != lacks}
    assert lacks in why_unrecorded(["python", "train.py"], environment)
