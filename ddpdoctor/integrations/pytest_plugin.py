"""A pytest plugin: ``pytest --ddpdoctor`` turns a hung distributed test into a failure that names rank and line.

pytest loads this module wherever ddpdoctor is installed, so it imports nothing before the option is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

DEFAULT_TIMEOUT_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ddpdoctor", "diagnosis of distributed tests")
    group.addoption(
        "--ddpdoctor", action="store_true", help="End tests whose ranks hang, and report the rank and line that hang."
    )
    group.addoption(
        "--ddpdoctor-timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="Seconds without progress before a test counts as hung.  [default: %(default)s]",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin if the option is given. Raises ``pytest.UsageError`` for an invalid timeout."""
    if not config.getoption("--ddpdoctor"):
        return
    import pytest

    timeout_s = config.getoption("--ddpdoctor-timeout")
    if not timeout_s > 0:
        raise pytest.UsageError(f"--ddpdoctor-timeout is {timeout_s}; it must be a number of seconds above 0")
    from ddpdoctor.integrations.watched_tests import WatchedTests

    config.pluginmanager.register(WatchedTests(timeout_s), "ddpdoctor-watched-tests")
