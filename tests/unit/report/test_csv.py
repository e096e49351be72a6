"""allreduce-bench as comma-separated values."""

import csv
import io

from ddpdoctor.report.formats import render_csv
from tests import benches


def read(report):
    return list(csv.DictReader(io.StringIO(render_csv(report))))


def test_the_columns_have_their_names_and_order_and_later_ones_come_behind():
    head = render_csv(benches.report()).splitlines()[0]
    assert head == (
        "collective,dtype,redop,mode,in_place,size_bytes,count,iterations,first_us,min_us,p50_us,p95_us,cv,algbw_gb_s,"
        "busbw_gb_s,wrong,p50_low_us,p50_high_us,warm"
    )


def test_a_row_a_measurement_with_all_its_digits():
    rows = read(benches.report())

    assert len(rows) == len(benches.results())
    first = benches.results()[0]
    assert float(rows[0]["p50_us"]) == first.p50_us
    assert {name: rows[0][name] for name in ("collective", "mode", "in_place", "size_bytes", "wrong", "warm")} == {
        "collective": "all_reduce", "mode": "latency", "in_place": "false", "size_bytes": "1024", "wrong": "0",
        "warm": "true",
    }  # fmt: skip


def test_what_has_no_value_is_empty():
    (row,) = read(benches.report(rows=[benches.measurement(1024, ranks=1, wrong=None)], ranks=1))
    assert (row["busbw_gb_s"], row["wrong"]) == ("", "")


def test_nothing_measured_is_a_head_alone():
    assert render_csv(benches.report(rows=())).count("\n") == 1
