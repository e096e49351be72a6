"""What keeps torch's watchdog from ending a rank before its report: set unless the user has set it."""

import json
import os
import subprocess
import sys

import pytest

from ddpdoctor.probes.load_torch import FORMER_HANDLING, HANDLING, OTHERS, hold_watchdog

OFF = dict.fromkeys((HANDLING, *OTHERS), "0")
UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("env", "changed"),
    [
        ({}, OFF),
        # torchrun sets 1 where the user has set nothing.
        ({**UNDER_TORCHRUN, HANDLING: "1"}, OFF),
        ({HANDLING: "1"}, {**OFF, HANDLING: "1"}),
        ({**UNDER_TORCHRUN, HANDLING: "3"}, {**OFF, HANDLING: "3"}),
        ({FORMER_HANDLING: "2"}, dict.fromkeys(OTHERS, "0")),
        (dict.fromkeys((HANDLING, *OTHERS), "1"), dict.fromkeys((HANDLING, *OTHERS), "1")),
    ],
)
def test_what_the_user_has_set_stays(env, changed):
    after = dict(env)
    hold_watchdog(after)

    assert after == env | changed


def test_it_is_set_before_torch_is_there():
    code = (
        "import os, sys, json; from ddpdoctor.probes.load_torch import load_torch\n"
        "class See:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'torch': print(json.dumps({{n: os.environ.get(n) for n in {sorted(OFF)}}})); sys.exit()\n"
        "sys.meta_path.insert(0, See()); load_torch()"
    )
    kept = {name: value for name, value in os.environ.items() if name not in OFF}
    seen = subprocess.run(
        [sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True, timeout=60
    )

    assert json.loads(seen.stdout) == OFF
