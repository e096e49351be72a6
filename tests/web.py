"""A web server of a test that keeps what is posted to it."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from typing_extensions import Self


class Receiver:
    """Answers posts with the given statuses, the last one for all that follow, and counts what is gotten."""

    def __init__(
        self, answers: tuple[int, ...] = (200,), read: Callable[[bytes], Any] = json.loads, location: str = ""
    ) -> None:
        self.received: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.gotten = 0
        self._answers = list(answers)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                receiver.received.append(read(self.rfile.read(int(self.headers["Content-Length"]))))
                left = receiver._answers
                self.send_response(left.pop(0) if len(left) > 1 else left[0])
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            def do_GET(self) -> None:
                receiver.gotten += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        self.url = f"{self.base}/hook"

    def __enter__(self) -> Self:
        # It looks that often whether it is to end, and an exit waits for that.
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
