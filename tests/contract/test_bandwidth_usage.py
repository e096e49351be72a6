"""`allreduce-bench` as a user meets it on the command line, before any rank starts."""

import json

import pytest

from ddpdoctor.cli.allreduce_bench import Options
from ddpdoctor.cli.options import declared_by

VERB = ("allreduce-bench",)


def test_help_shows_every_option_with_its_default(run):
    done = run("--help")
    text = " ".join(done.stdout.split())

    assert (done.returncode, done.stderr) == (0, "")
    for one in declared_by(Options):
        assert f"{one.names[0]} " in text
    for default in ("1KiB", "1GiB", "30s", "all_reduce", "float32", "sum", "text", "error", "60s"):
        assert f"[default: {default}" in text


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--min-size", "5GiB", "--max-size", "1KiB"), "--min-size 5 GiB is above --max-size 1 KiB", "not above"),
        (("--min-size", "big"), "--min-size is 'big'", "1KiB"),
        (("--dtype", "float3"), "--dtype float3 is not known", "bfloat16"),
        (("--dtype", ","), "--dtype is empty", "bfloat16"),
        (("--collective", "all_reduce,alreduce"), "--collective alreduce is not known", "reduce_scatter"),
        (("--op", "xor"), "--op xor is not known", "sum"),
        (("--dtype", "int32", "--op", "avg", "--backend", "gloo"), "gloo cannot reduce int32 with avg", "float32"),
        (("--budget", "soon"), "--budget is 'soon'", "5m"),
        (("--timeout", "0"), "--timeout is '0'", "5m"),
        (("--expect", "fast"), "--expect is 'fast'", "460GB/s"),
        (("--fail-below", "90%"), "--fail-below needs --compare", "report.json"),
        (("--compare", "nowhere", "--fail-below", "120%"), "--fail-below is '120%'", "90%"),
        (("--compare", "nowhere"), "there is no nowhere", ""),
        (("--compare", "broken.json"), "broken.json: the report cannot be read", ""),
        (("--compare", "other.json"), "other.json is not a report of allreduce-bench", "--report-dir"),
        (("--compare", "damaged.json"), "damaged.json cannot be read: size_bytes", "--report-dir"),
        (("--model-size", "huge"), "--model-size is 'huge'", "350M"),
        (("--output", "no/such"), "--output no/such cannot be written: No such file", "another file"),
        (("--output", "."), "--output . cannot be written: Is a directory", "another file"),
        (("--plot", "curve.gif"), "curve.gif", ".svg"),
        (("--plot", "a.svg", "--output", "a.svg"), "--plot and --output are both a.svg", "its own"),
        (("--report-dir", "taken"), "already holds another run", "--report-dir"),
        (("--iters", "0"), "--iters", ""),
        (("--factor", "1"), "--factor", ""),
        (("--backend", "mpi"), "--backend", "gloo"),
        (("--format", "xml"), "--format", "nccl-tests"),
        (("--nproc-per-node", "0"), "--nproc-per-node", ""),
        (("--sizes", "3"), "No such option: --sizes", "--help"),
    ],
)
def test_nonsense_is_an_error_that_says_what_is_possible(run, tmp_path, options, message, hint):
    _write_reports(tmp_path)
    done = run(*options)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count(message) == 1
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "a.svg").exists()


def _write_reports(folder):
    """Write what is no report, one of another verb, and one with a damaged measurement."""
    report = {
        "schema_version": 1, "tool": {"name": "ddpdoctor", "version": "0"}, "command": [], "started_at": "",
        "ended_at": "", "job": None, "verdict": None, "findings": [], "checks": [], "ranks": [], "data": {},
    }  # fmt: skip
    damaged = {"verb": "allreduce-bench", "results": [{"collective": "all_reduce", "dtype": "float32", "redop": "sum",
               "mode": "latency", "in_place": True, "size_bytes": "many"}]}  # fmt: skip
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text(json.dumps(report))
    (folder / "damaged.json").write_text(json.dumps({**report, "data": damaged}))
    (folder / "taken").mkdir()
    (folder / "taken" / "report.json").write_text("{}")


def test_readable_defaults_are_those_of_the_settings():
    from ddpdoctor.model.bandwidth import BenchSettings

    declared = {one.field: one for one in declared_by(Options)}
    shared = [name for name in BenchSettings.__slots__ if name in declared and name != "backend"]
    defaults = {name: declared[name].default for name in shared}
    readable = {name: declared[name].parse(text) if isinstance(text, str) else text for name, text in defaults.items()}
    assert readable == {name: getattr(BenchSettings(), name) for name in shared}
