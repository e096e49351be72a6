"""Healthy: rank 0 prepares the data in the way that is asked for while the others wait for it in a barrier.

It works until the report of that is there, and a little longer; where its work counts as progress, and nothing is
reported, for three hang timeouts.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

HOW, LONGEST_S = sys.argv[1], float(sys.argv[2])
REPORT = Path(os.environ.get("DDPDOCTOR_RUN", "/nonexistent")) / "report.json"
BLOCK = bytes(2**20)
COUNTS = "import sys\nfor n in range(10**12): pass"
SERVES = """
import http.server, sys
class Endless(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(65536))
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Endless)
print(server.server_port, flush=True)
server.serve_forever()
"""


def has_time() -> bool:
    return time.monotonic() < END and not REPORT.exists()


def tokenize() -> int:
    total = 0
    while has_time():
        total += sum(n * n for n in range(50_000))  # python
    return total


def multiply() -> None:
    matrix = torch.rand(500, 500)
    while has_time():
        matrix = torch.tanh(matrix @ matrix)  # native


def compile_parts() -> None:
    with subprocess.Popen([sys.executable, "-c", COUNTS], env={"PATH": os.environ["PATH"]}) as child:
        while has_time():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)  # child
        child.kill()


def read_files() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(8 * BLOCK)
        file.flush()
        while has_time():
            Path(file.name).read_bytes()  # read
            time.sleep(0.05)


def write_files() -> None:
    while has_time():
        with tempfile.TemporaryFile() as file:
            file.write(BLOCK)  # write
        time.sleep(0.05)


def download() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE, start_new_session=True)
    with urllib.request.urlopen(f"http://127.0.0.1:{int(server.stdout.readline())}/") as answer:
        while has_time():
            answer.read(2**16)  # download
            time.sleep(0.01)
    server.kill()


def sleep() -> None:
    while has_time():
        time.sleep(0.2)  # sleep


FORMS: dict[str, Callable[[], object]] = {
    "python": tokenize,
    "native": multiply,
    "child": compile_parts,
    "read": read_files,
    "write": write_files,
    "download": download,
    "sleep": sleep,
}

dist.init_process_group("gloo")
END = time.monotonic() + LONGEST_S
if dist.get_rank() == 0:
    FORMS[HOW]()
dist.barrier()
dist.destroy_process_group()
