"""The recorder reads every flight recorder that a build of torch has, and sets what the user has not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.rules.progress.recording import losses_of

DATA = Path(__file__).parents[2] / "data" / "flight-recorder"
PROGRAM = """
import json, os, sys, types
build = json.load(sys.stdin)
native = types.ModuleType("torch._C._distributed_c10d")

def text_of(dump):
    if dump is None:
        raise RuntimeError("no such recorder\\nsecond line")
    return json.dumps(dump).encode()

for name, dumps in build["dumps"].items():
    def one_for_all(includeCollectives=None, onlyActive=None, dump=dumps):
        return text_of(dump)
    def one_for_each(includeCollectives=None, onlyActive=None, backend="gloo", *, dumps=dumps):
        return text_of(dumps.get(backend, {}))
    function = one_for_each if name == "hooked" else one_for_all
    function.__doc__ = build["docs"].get(name)
    setattr(native, "_dump_nccl_trace_json" if name == "own" else "_dump_fr_trace_json", function)
    if name in ("hooked", "shared"):
        native.FlightRecorderHook = object
if build["nccl"]:
    native.ProcessGroupNCCL = object
torch = types.ModuleType("torch")
torch.__version__ = build["version"]
sys.modules.update({"torch": torch, "torch._C._distributed_c10d": native})
from ddpdoctor.recorder.calls import flight, groups
world = types.SimpleNamespace(default_pg=object(), pg_names={1: "0", 2: "1"})
groups.c10d = types.SimpleNamespace(_world=world)
flight.turn_on()
names = [name for name in os.environ if name.startswith(("TORCH_NCCL", "TORCH_FR"))]
print(json.dumps([flight.entries_now(), {name: os.environ[name] for name in names}]))
"""
TAKES = "_dump_fr_trace_json(includeCollectives: bool | None = None, onlyActive: bool | None = None"
SIGNATURES = {
    "shared": f"{TAKES}) -> bytes\n\n\n    Arguments:\n        includeCollectives(bool): Include the backend: all.",
    "hooked": f"{TAKES}, backend: str = 'gloo') -> bytes",
}
"""Docstrings of torch 2.14.1 and 2.15. The hook came before the argument."""


def run(version: str, dumps: dict[str, Any], *, nccl: bool = True, **env: str) -> tuple[Any, Any]:
    """Return the entries and the variables of a recorder that meets such a build of torch."""
    build = json.dumps({"version": version, "dumps": dumps, "nccl": nccl, "docs": SIGNATURES})
    env = {"DDPDOCTOR_RUN": "/run/folder", **env}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=build, env=env, capture_output=True, text=True, check=True
    )
    answer, variables = json.loads(done.stdout)
    return answer, variables


def entry(number: int, name: str = "nccl:all_reduce", **more: Any) -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"], "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": name, "state": "scheduled", "retired": False, "time_created_ns": number, **more,
    }  # fmt: skip


def numbers(answer: Any) -> list[int]:
    return [found["collective_seq_id"] for found in answer["entries"]]


def test_nccls_own_recorder_is_read_and_not_that_of_gloo() -> None:
    dumps = {"own": {"entries": [entry(3)]}, "gloo": {"entries": [entry(7, "gloo:all_reduce")]}}
    assert numbers(run("2.13.0+cu130", dumps)[0]) == [3]


def test_the_recorder_of_nccl2_is_read() -> None:
    hooked = json.loads((DATA / "nccl2-2.15.json").read_text())
    answer, _ = run("2.15.0+cu132", {"own": {}, "hooked": {"nccl2": hooked}})
    assert [found["profiling_name"] for found in answer["entries"]] == [
        "nccl2:all_reduce", "nccl2:all_reduce", "nccl2:recv 1<-2", "nccl2:send 0->1",
    ]  # fmt: skip


def test_a_recorder_that_hooked_backends_share_with_gloo_is_read_without_an_argument() -> None:
    own = json.loads((DATA / "nccl-2.14.1.json").read_text())
    hooked = {"entries": [entry(9, "nccl2:broadcast"), entry(8, "gloo:all_reduce")]}
    assert numbers(run("2.14.1+cu130", {"own": own, "shared": {}})[0]) == [5]
    assert numbers(run("2.14.1+cu130", {"own": own, "shared": hooked})[0]) == [5, 9]


@pytest.mark.parametrize(
    ("dumps", "found", "lost"),
    [
        ({"own": None, "hooked": {"nccl2": {"entries": [entry(4, "nccl2:broadcast")]}}}, [4], "nccl"),
        ({"own": {"entries": [entry(3)]}, "hooked": {"nccl2": None}}, [3], "nccl2"),
        ({"own": {"entries": [entry(3)]}, "shared": None}, [3], "nccl2 and nccl-lazy"),
    ],
)
def test_a_recorder_that_fails_takes_no_other_with_it(dumps: Any, found: list[int], lost: str, tmp_path: Path) -> None:
    answer, _ = run("2.15.0+cu132", dumps, DDPDOCTOR_RUN=str(tmp_path))
    assert numbers(answer) == found
    (note,) = [path.read_text() for path in tmp_path.glob("lost-*")]
    assert note == f"\nflight recorder of {lost}: RuntimeError: no such recorder second line"
    assert losses_of(note.strip()) == (
        f"flight recorder of {lost} failed, so collectives that wait on a GPU may not be recorded",
    )


def test_the_oldest_pending_survives_any_number_that_came_later() -> None:
    assert numbers(run("2.6.0", {"own": {"entries": [entry(at) for at in range(1, 2001)]}})[0]) == [1]


def test_of_calls_that_wait_for_their_device_only_the_newest_is_pending() -> None:
    """torch 2.14 gives the events of what is done to the next call, so that all look pending as long as that one is."""
    own = {"entries": [entry(at) for at in range(1, 12)]}
    assert numbers(run("2.14.1+cu130", {"own": own}, TORCH_NCCL_BLOCKING_WAIT="1")[0]) == [11]
    assert numbers(run("2.14.1+cu130", {"own": own}, TORCH_NCCL_BLOCKING_WAIT="0")[0]) == [1]


def test_entries_of_a_group_that_is_no_more_are_left_out() -> None:
    gone = entry(1, process_group=["5", ""])
    assert numbers(run("2.6.0", {"own": {"entries": [gone, entry(2)]}})[0]) == [2]


def test_a_build_without_a_recorder_answers_with_nothing() -> None:
    answer, variables = run("2.13.0+cpu", {}, nccl=False)
    assert (answer["entries"], answer["timed"], variables) == ([], 0, {})


@pytest.mark.parametrize(("value", "timed"), [("1", 1), ("TRUE", 1), ("0", 0), ("", 0)])
def test_that_torch_times_kernels_is_noted(value: str, timed: int) -> None:
    assert run("2.6.0", {}, TORCH_NCCL_ENABLE_TIMING=value)[0]["timed"] == timed


def test_torch_2_6_gets_a_buffer_and_dumps_into_the_run_folder() -> None:
    _, variables = run("2.6.0+cu124", {})
    target = variables.pop("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    assert target.startswith("/run/folder/evidence/")
    assert variables == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_later_torch_gets_the_names_of_which_it_does_not_warn() -> None:
    _, variables = run("2.15.0+cu132", {})
    assert sorted(variables) == ["TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"]


def test_what_the_user_has_set_stays_under_either_name() -> None:
    old = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/trace_"}
    assert run("2.15.0", {}, **old)[1] == old
    assert run("2.6.0", {}, **old)[1] == {**old, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    new = {"TORCH_FR_BUFFER_SIZE": "50", "TORCH_FR_DUMP_TEMP_FILE": "/mine/trace_"}
    assert run("2.15.0", {}, **new)[1] == new


def test_a_child_that_becomes_a_rank_dumps_under_its_own_name() -> None:
    _, variables = run("2.15.0", {}, TORCH_FR_DUMP_TEMP_FILE="/run/folder/evidence/1-1.flight")
    assert variables["TORCH_FR_DUMP_TEMP_FILE"] != "/run/folder/evidence/1-1.flight"
