"""throttle, temp-power."""

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from tests.rules.environment.build import ask, node
from tests.rules.environment.gpu_nodes import all_named, gpu_node, gpus_of, with_gpu

E, W, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
LAPTOP = "NVIDIA GeForce RTX 4070 Laptop GPU"


@pytest.mark.parametrize(
    ("state", "severity", "summary"),
    [
        ("hw-slowdown", E, "GPU 5 is throttled by its hardware: hardware slowdown, hardware thermal slowdown"),
        ("power-brake", E, "GPUs 0-7 are throttled by their hardware: hardware slowdown, power brake"),
        ("sw-thermal", W, "GPU 5 is throttled by the driver because of heat"),
        ("power-cap", INFO, "GPUs 0-7 run at the power limit, as under full load: a process is using them now"),
    ],
)
def test_slowed_down(state, severity, summary):
    _, (finding,) = ask("throttle", gpu_node(state, ranks=8))
    assert (finding.severity, finding.summary) == (severity, summary)
    assert "clocks event reasons 0x" in finding.evidence[0]
    assert finding.ranks == ((5,) if "GPU 5" in summary else tuple(range(8)))


def test_an_idle_gpu_is_not_slow():
    check, findings = ask("throttle", gpu_node())
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "reasons 0x1; 8 of 8 idle", ())


def test_a_laptop_on_battery_is_a_warning():
    _, (finding,) = ask("throttle", node(gpus=all_named(gpus_of("power-brake"), LAPTOP)))
    assert finding.severity is W


@pytest.mark.parametrize("reasons", [0x0, 0x2, 0x10, 0x100])
def test_reasons_that_are_settings(reasons):
    assert ask("throttle", node(gpus=with_gpu(gpus_of(), 0, clock_event_reasons=reasons)))[1] == ()


def test_nothing_is_reported():
    gpus = gpus_of()
    for index in range(8):
        gpus = with_gpu(gpus, index, clock_event_reasons=None, temperature_c=None, power_limit_mw=None)
    assert ask("throttle", node(gpus=gpus))[0].outcome is Outcome.SKIPPED
    assert ask("temp-power", node(gpus=gpus))[0].outcome is Outcome.SKIPPED


@pytest.mark.parametrize(
    ("state", "summary", "fix"),
    [
        (
            "hot",
            "GPU 5 is within 5 °C of thermal throttling",
            "nvidia-smi -q -d TEMPERATURE -i 5; then check the cooling",
        ),
        (
            "power-limit",
            "GPU 5 has a lowered power limit, and will be slow under load",
            "sudo nvidia-smi -i 5 -pl 700",
        ),
    ],
)
def test_hot_or_limited(state, summary, fix):
    _, (finding,) = ask("temp-power", gpu_node(state))
    assert (finding.severity, finding.summary, finding.fix) == (W, summary, fix)


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"temperature_c": 82}, Outcome.FAILED),
        ({"temperature_c": 81}, Outcome.PASSED),
        ({"temperature_c": 200, "slowdown_temperature_c": None}, Outcome.PASSED),
        ({"power_limit_mw": 699_000}, Outcome.PASSED),
        ({"power_limit_mw": 698_999}, Outcome.FAILED),
        ({"power_limit_mw": 750_000}, Outcome.PASSED),
        ({"power_limit_mw": 100, "default_power_limit_mw": None}, Outcome.PASSED),
    ],
)
def test_limits(fields, outcome):
    assert ask("temp-power", node(gpus=with_gpu(gpus_of(), 0, **fields)))[0].outcome is outcome


def test_a_laptops_limit_moves_by_itself():
    gpus = with_gpu(all_named(gpus_of(), LAPTOP), 0, power_limit_mw=60_000)
    assert ask("temp-power", node(gpus=gpus))[1][0].severity is INFO


@pytest.mark.parametrize("kind", ["throttle", "temp-power"])
def test_two_consumer_cards_are_well(kind):
    assert ask(kind, gpu_node(machine="workstation2"))[0].outcome is Outcome.PASSED
