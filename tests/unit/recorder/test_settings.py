"""What wrap tells the ranks arrives as it was sent, and the rest of the environment cannot break it."""

import pytest

from ddpdoctor.recorder.settings import RecorderSettings, read_settings


def values(settings):
    return {name: getattr(settings, name) for name in RecorderSettings.__slots__}


def test_settings_arrive_as_they_were_sent():
    sent = RecorderSettings(check_every=7, tune_rounds=2)
    assert sent.variables() == {
        "DDPDOCTOR_CHECK_EVERY": "7", "DDPDOCTOR_SPEED": "0", "DDPDOCTOR_TUNE_ROUNDS": "2", "DDPDOCTOR_TUNE_ONLY": "",
            "DDPDOCTOR_TUNE_SETTING": "", "DDPDOCTOR_LOG_FINDINGS": "0", "DDPDOCTOR_CHECK_AUTO": "0",
    }  # fmt: skip
    assert values(read_settings(sent.variables())) == values(sent)


@pytest.mark.parametrize("env", [{}, {"DDPDOCTOR_CHECK_EVERY": ""}, {"DDPDOCTOR_CHECK_EVERY": "often"}])
def test_what_is_no_value_leaves_the_default(env):
    assert values(read_settings(env)) == values(RecorderSettings())
