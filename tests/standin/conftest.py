"""Runs jobs of the GPU tests on the stand-in.

It is made when tests are collected: no time limit of a test counts the download. ``STANDIN_TORCH`` is the version of
torch.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.model.words import rank_list
from tests.gpu.catalog import DETAIL, HANG, HEALTHY, JOBS, OFF, TIMED, verb, wrapped
from tests.gpu.running import Done, Runner
from tests.standin import environment

HANG_TIMEOUT_S = 6
LIMIT_S = 200.0
TORCH = os.environ.get("STANDIN_TORCH") or environment.TORCH
_TWO_GPUS = {"FAKECUDA_DEVICES": "2", "OWN_GPUS": "1"}
_LOGGED = """import os, sys
put = 'touch "$KERNEL_LOG" && mount --bind "$KERNEL_LOG" /dev/kmsg && exec "$@"'
os.execvp("unshare", ["unshare", "--mount", "sh", "-c", put, "sh", sys.executable, *sys.argv[1:]])"""
"""A command of Python's that puts a file in the place of the kernel's log, for the command that follows."""
_XIDS = {
    "logged": ("214", "48, pid={{pid}}, name=python, Ch 00000010"),
    "fallen": ("719", "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
    "innocent": ("214", "48, pid=1, name=other, Ch 00000010"),
}
"""Codes of CUDA's error, and the driver's words of it."""
_SHORT = ("--hang-timeout", "{hang_s}", "--on-hang", "auto")
_LOST = {
    code: wrapped(f"lost_{code}", "faults", *HANG, *OFF, env={"FAULT": "none", "FAKECUDA_FAIL": f"1:{code}:12"})
    for code in ("214", "719")
}
_CROWD = Path(__file__).with_name("crowd.py")
_WATCHDOG = wrapped(
    "watchdog_crowded", "watchdog", "--hang-timeout", "{hang_s}", "--on-hang", "report", *OFF, limit_s=150
)
_OWN = (
    *_LOST.values(),
    *(
        replace(
            _LOST[code],
            name=f"lost_{name}",
            command=("-c", _LOGGED, *_LOST[code].command),
            env={**_LOST[code].env, "XID": words, "KERNEL_LOG": "{folder}/kernel.log"},
        )
        for name, (code, words) in _XIDS.items()
    ),
    *(
        wrapped(f"stall_{name}", "faults", *level, env={"FAULT": "stall", "FAKENCCL_STALL": number, **env})
        for name, level, number, env in (
            ("off", (*HANG, *OFF), "11", TIMED),
            ("detail", (*HANG, *DETAIL), "11", {}),
            ("healthy", (*_SHORT, *OFF), "11:14", TIMED),
            ("untimed", (*_SHORT, *OFF), "11:14", {}),
            ("compared", (*_SHORT, *DETAIL), "11:14", {}),
        )
    ),
    wrapped("sleeper_timed", "sleeper", *HANG, *OFF, env={"SEEDED": "1", **TIMED}),
    wrapped("spins", "sleeper", *HANG, *OFF, env={"SEEDED": "1", "FAKECUDA_SPIN": "1"}),
    wrapped("limit_cleanup", "watchdog", *HEALTHY, *OFF, env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, limit_s=150),
    wrapped("limit_blocking", "watchdog", *HANG, *OFF, env={"TORCH_NCCL_BLOCKING_WAIT": "1"}),
    replace(_WATCHDOG, name="watchdog_crowded", command=(str(_CROWD), "{folder}", *_WATCHDOG.command)),
    wrapped("two_gpus_sleeper", "sleeper", *HANG, *OFF, env={"SEEDED": "1", **_TWO_GPUS}),
    wrapped("two_gpus_trains", "trains", *HEALTHY, *OFF, env=_TWO_GPUS),
    verb("check_env_nvml", "check-env", env=_TWO_GPUS),
    verb("check_env_hung", "check-env", env={"FAKECUDA_HANG": "1"}, limit_s=150),
)
KNOWN = JOBS | {job.name: job for job in _OWN}
NOT_MADE = pytest.StashKey[environment.NotMadeError]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make the stand-in if a test that was selected needs it; skip them where this machine cannot have it."""
    own = [item for item in items if item.get_closest_marker("standin") is not None]
    try:
        if own:
            environment.make(TORCH)
    except environment.NotMadeError as error:
        config.stash[NOT_MADE] = error
        has_to = isinstance(error, environment.NoToolsError) and os.environ.get("CI") == "true"
        if not has_to and isinstance(error, (environment.NoToolsError, environment.NoWheelError)):
            for item in own:
                item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.fixture
def dry() -> bool:
    """Jobs run on what their scripts take for a GPU."""
    return False


@pytest.fixture(scope="session")
def known() -> Iterator[dict[str, Done]]:
    """Jobs that have run, by name. There is one GPU, as they have it: of two, torch 2.15 gives each rank its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKECUDA_DEVICES", "1")
        yield {}


@pytest.fixture
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, known: dict[str, Done]
) -> Callable[[str], Done]:
    """Run a job, once. What was said of it becomes a property of the test, which ``--junitxml`` writes."""
    if NOT_MADE in request.config.stash:
        raise request.config.stash[NOT_MADE]
    python = str(environment.make(TORCH))

    def one(name: str) -> Done:
        if name not in known:
            runner = Runner(
                [KNOWN[name]], tmp_path_factory.mktemp("jobs"), width=1, limit_s=LIMIT_S, ended=lambda _done: None,
                dry=False, python=python, hang_s=HANG_TIMEOUT_S,
            )  # fmt: skip
            known[name] = runner(name)
            print(known[name].stdout, known[name].stderr)  # pytest shows it where the test fails
        assert not known[name].problem, f"{known[name].problem}: {known[name].stderr[-2000:]}"
        verdict = known[name].report.get("verdict")
        ranks = f", {rank_list(verdict['ranks'])}" if verdict and verdict["ranks"] else ""
        said = f"{verdict['kind']}{ranks}" if verdict else "none"
        request.node.user_properties.append((name, said))
        return known[name]

    return one
