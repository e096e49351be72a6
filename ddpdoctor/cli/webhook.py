"""Sends a verdict to a webhook: as JSON, or in the form of Slack or Teams."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.model.findings import Report

WebhookFormat = Literal["json", "slack", "teams"]
TRIES = 3
LIMIT_S = 10.0
"""Of one try."""
PAUSE_S = 2.0
"""Before the second try; twice that before the third."""
TOO_MANY = 429
SERVER_ERROR = 500


def check_webhook(url: str) -> None:
    """Raise ``UserError`` for a text that is no URL of a web server."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UserError("--webhook is no URL that begins with https://", help="Give the URL of the service, in quotes.")


def call_webhook(
    url: str, form: WebhookFormat, report: Report, file: Path, pause: Callable[[float], None] = time.sleep
) -> str:
    """Post the verdict. Return what went wrong, or an empty string. The URL is a secret and never shown."""
    import urllib.error
    import urllib.request

    from ddpdoctor.diagnose.bundles import SecretCount

    body = json.dumps(FORMS[form](SecretCount().value(report), file)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "ddpdoctor"})  # noqa: S310 - checked by check_webhook
    problem = ""
    for number in range(TRIES):
        if number:
            pause(PAUSE_S * number)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S):  # noqa: S310
                return ""
        except urllib.error.HTTPError as error:
            problem = f"it answered {error.code} {error.reason}"
            if error.code != TOO_MANY and error.code < SERVER_ERROR:
                break
        except OSError as error:
            problem = str(getattr(error, "reason", error))
    return f"--webhook: the verdict could not be sent to {urlsplit(url).hostname}: {problem}"


def _plain(report: Report, file: Path) -> dict[str, Any]:
    from ddpdoctor.model.codec import encode

    return {
        "text": _sentence(report),
        "report": str(file),
        "started_at": report.started_at,
        "ended_at": report.ended_at,
        "job": encode(report.job),
        "verdict": encode(report.verdict),
    }


def _slack(report: Report, file: Path) -> dict[str, Any]:
    return {"text": "\n".join(_lines(report, file))}


def _teams(report: Report, file: Path) -> dict[str, Any]:
    blocks = [{"type": "TextBlock", "text": line, "wrap": True} for line in _lines(report, file)]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
        "body": blocks,
    }  # fmt: skip
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}


FORMS: dict[str, Callable[[Report, Path], dict[str, Any]]] = {"json": _plain, "slack": _slack, "teams": _teams}


def _sentence(report: Report) -> str:
    verdict = report.verdict
    return "ddpdoctor: no problem found" if verdict is None else f"ddpdoctor: {verdict.summary} ({verdict.code})"


def _lines(report: Report, file: Path) -> list[str]:
    fix = report.verdict.fix if report.verdict is not None else ""
    return [_sentence(report), *([f"To do: {fix}"] if fix else []), f"Report: {file}"]
