"""What `wrap` does with the verdict of a real job: a command, a webhook, excluded hosts, an exit status."""

import json
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests import forking
from tests.scenarios.running import PATIENT, clean_environment, run
from tests.web import Receiver

pytestmark = pytest.mark.usefixtures("preloaded_python")

KEEP = """
import json, os, sys
given = {name: value for name, value in os.environ.items() if name.startswith("DDPDOCTOR_")}
with open(sys.argv[1], "w") as file:
    json.dump([given, json.load(sys.stdin)], file)
print("said by the command")
"""


def test_a_fault_of_a_machine_is_told_sent_and_excluded(tmp_path: Path) -> None:
    told, excluded = tmp_path / "told.json", tmp_path / "excluded"
    with Receiver(answers=(503, 200)) as receiver:
        ran = run(
            "crash_hardware", tmp_path / "run", *PATIENT, "--exit-status-of-verdict",
            "--on-finding", shlex.join([sys.executable, "-c", KEEP, str(told)]),
            "--webhook", receiver.url, "--exclude-file", str(excluded), ranks=2,
        )  # fmt: skip
    variables, report = json.loads(told.read_text())
    assert ran.status == 75, ran.stderr
    assert report == ran.report
    assert (variables["DDPDOCTOR_CODE"], variables["DDPDOCTOR_RANKS"]) == ("DD604", "1")
    assert variables["DDPDOCTOR_ORIGIN"] == report["verdict"]["origin"] == "machine"
    assert Path(variables["DDPDOCTOR_REPORT"]) == ran.folder / "report.json"
    assert "said by the command" in ran.stderr
    assert ran.stdout == ""

    first, second = receiver.received
    assert first == second, "the first try was answered with 503"
    assert second["verdict"]["code"] == "DD604"
    assert "hunter2" not in json.dumps(second)

    comment, host = excluded.read_text().splitlines()
    assert host == socket.gethostname()
    assert comment.startswith("# 20")
    assert "DD604 crash" in comment


def test_an_action_that_fails_costs_the_job_nothing(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/token"
        ran = run(
            "crash_exit_status", tmp_path, *PATIENT, "--exit-status-of-verdict", "--on-finding", "exit 7",
            "--webhook", url, "--exclude-file", str(tmp_path / "excluded"), ranks=2,
        )  # fmt: skip
    assert ran.status == 70, "the script is at fault"
    assert "the command ended with status 7" in ran.stderr
    assert "could not be sent to 127.0.0.1: " in ran.stderr
    assert "/token" not in ran.stderr
    assert not (tmp_path / "excluded").exists()


def test_a_healthy_job_acts_on_nothing(tmp_path: Path) -> None:
    command = shlex.join(["touch", str(tmp_path / "acted")])
    ran = run("clean_plain", tmp_path, *PATIENT, "--exit-status-of-verdict", "--on-finding", command, ranks=2)
    assert ran.status == 0
    assert not (tmp_path / "acted").exists()


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [("--webhook", "hooks.example/x", "https://"), ("--exclude-file", "/proc/none/x", "cannot be written")],
)
def test_what_cannot_be_used_is_refused_before_the_start(option: str, value: str, hint: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')")
    command = ("-m", "ddpdoctor", "wrap", option, value, str(script))
    done = forking.run(*command, cwd=tmp_path, env=clean_environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert hint in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
