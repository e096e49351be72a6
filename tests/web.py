"""A web server of a test that keeps what is posted to it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from typing_extensions import Self


class Receiver:
    """Answers posts with the given statuses, the last one for all that follow."""

    def __init__(self, answers: tuple[int, ...] = (200,)) -> None:
        self.received: list[Any] = []
        self._answers = list(answers)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                left = receiver._answers
                self.send_response(left.pop(0) if len(left) > 1 else left[0])
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
