"""What each engine costs that could carry a job's records: python -m tests.bench.transports [MEMBERS] [ENGINE ...]

Engines: ours, asyncio, threads (multiprocessing.connection), zmq (pyzmq with CURVE), tcpstore (torch's), and bare,
which does nothing. Those that are not installed are left out. Each server is a process of its own, which another
Engines: ours, asyncio, threads (multiprocessing.connection), zmq (pyzmq with CURVE), tcpstore (torch), and bare,
with all members connected, and the microseconds of processor time that one request costs the server.
"""

import hashlib
import importlib.util
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

TOKEN = hashlib.sha256(b"bench").digest()
REQUESTS = 5000
MODULES = {"zmq": "zmq", "tcpstore": "torch"}


def serve_ours() -> int:
    """Serve; return the port."""
    from ddpdoctor.exchange.server import Server

    return Server(0, TOKEN, one_host=True).port


def serve_asyncio() -> int:
    """Serve streams, with a digest of the token in place of a proof of it."""
    import asyncio

    ports: list[int] = []
    listens = threading.Event()
    values: dict[bytes, bytes] = {}

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(reader.readexactly(32), 10)
            while True:
                length = int.from_bytes(await reader.readexactly(4), "big")
                request = await asyncio.wait_for(reader.readexactly(length), 20)
                values[request[:8]] = request
                writer.write(len(request).to_bytes(4, "big") + request)
                await asyncio.wait_for(writer.drain(), 20)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(serve_one, "127.0.0.1", 0, backlog=4096)
        ports.append(server.sockets[0].getsockname()[1])
        listens.set()
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    listens.wait()
    return ports[0]


def serve_threads() -> int:
    """Serve multiprocessing's connections, a thread each: they have no limits of time of their own."""
    from multiprocessing.connection import Listener

    listener = Listener(("127.0.0.1", 0), backlog=4096, authkey=TOKEN)

    def serve_one(connection) -> None:
        values = {}
        while True:
            try:
                request = connection.recv_bytes(2**22)
            except (OSError, EOFError):
                return
            values[request[:8]] = request
            connection.send_bytes(request)

    def serve() -> None:
        while True:
            threading.Thread(target=serve_one, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.address[1])


def keys() -> tuple[bytes, bytes]:
    """Return the pair of keys that both sides make from the token."""
    import zmq
    from zmq.utils import z85

    secret = z85.encode(TOKEN)
    return zmq.curve_public(secret), secret


def serve_zmq() -> int:
    """Serve a ROUTER with CURVE and heartbeats."""
    import zmq

    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.curve_publickey, router.curve_secretkey = keys()
    router.curve_server = True
    router.maxmsgsize, router.heartbeat_ivl = 2**22, 1000
    port = router.bind_to_random_port("tcp://127.0.0.1")
    values = {}

    def serve() -> None:
        while True:
            sender, _, request = router.recv_multipart()
            values[request[:8]] = request
            router.send_multipart((sender, b"", request))

    threading.Thread(target=serve, daemon=True).start()
    return int(port)


def serve_tcpstore() -> int:
    """Serve torch's store, without any proof of a token."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    KEPT.append(store)
    return int(store.port)


def join_ours(port: int):
    """Return a request as a function; so do all that follow."""
    from ddpdoctor.exchange.wire import open_client

    store = open_client(("127.0.0.1",), port, TOKEN, 30)
    return lambda: store.set("key", b"x" * 100)


def join_asyncio(port: int):
    """Connect by a plain socket."""
    import socket

    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(TOKEN)

    def ask() -> None:
        connection.sendall((100).to_bytes(4, "big") + b"x" * 100)
        received = 0
        while received < 104:
            received += len(connection.recv(104))

    return ask


def join_threads(port: int):
    """Connect as multiprocessing does."""
    from multiprocessing.connection import Client

    connection = Client(("127.0.0.1", port), authkey=TOKEN)
    return lambda: (connection.send_bytes(b"x" * 100), connection.recv_bytes())


def join_zmq(port: int):
    """Connect a REQ."""
    import zmq

    request = zmq.Context.instance().socket(zmq.REQ)
    request.curve_publickey, request.curve_secretkey = keys()
    request.curve_serverkey = keys()[0]
    request.connect(f"tcp://127.0.0.1:{port}")
    return lambda: (request.send(b"x" * 100), request.recv())


def join_tcpstore(port: int):
    """Connect as a rank does."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, use_libuv=True)
    return lambda: store.add("key", 1)


KEPT: list[object] = []
SERVE = {
    "bare": lambda: 0, "ours": serve_ours, "asyncio": serve_asyncio, "threads": serve_threads, "zmq": serve_zmq,
    "tcpstore": serve_tcpstore,
}  # fmt: skip
JOIN = {
    "ours": join_ours, "asyncio": join_asyncio, "threads": join_threads, "zmq": join_zmq, "tcpstore": join_tcpstore,
}  # fmt: skip


def be_server(engine: str) -> None:
    """Serve until standard input ends; say the port, and what it took."""
    port = SERVE[engine]()
    print(port, time.process_time(), flush=True)
    sys.stdin.read()


def be_members(engine: str, port: int, count: int, server: int) -> None:
    """Be all members; say how long they took to connect, and what a request costs the server."""
    began = time.perf_counter()
    asks = [JOIN[engine](port) for _ in range(count)]
    for ask in asks:
        ask()
    joined_s = time.perf_counter() - began
    before_s = processor_s(server)
    for _ in range(REQUESTS):
        asks[0]()
    print(joined_s, (processor_s(server) - before_s) / REQUESTS * 1e6, flush=True)
    sys.stdin.read()


def processor_s(pid: int) -> float:
    """Return what a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """Return what a process has to itself."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_", "Shared_Dirty"))) / 1024


def start(*arguments: object) -> tuple[subprocess.Popen[str], list[str], float]:
    """Start a part of this program; return it, what it says first, and after how long."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tests.bench.transports", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split(), time.perf_counter() - began


def main() -> None:
    """Print a line for each engine."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    if sys.argv[1:2] == ["serve"]:
        be_server(sys.argv[2])
        return
    if sys.argv[1:2] == ["join"]:
        be_members(sys.argv[2], *map(int, sys.argv[3:6]))
        return
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    print(f"{os.cpu_count()} cores, {count} members")
    for engine in sys.argv[2:] or SERVE:
        if engine in MODULES and importlib.util.find_spec(MODULES[engine]) is None:
            print(f"{engine}: not installed")
            continue
        server, (port, cpu_s), wall_s = start("serve", engine)
        before = memory_mib(server.pid)
        line = f"{engine}: listens after {float(cpu_s):.3f} s of processor, {wall_s:.2f} s; {before:.1f} MiB"
        if engine in JOIN:
            members, (joined_s, request_us), _ = start("join", engine, port, count, server.pid)
            after = memory_mib(server.pid)
            line += f", {after:.1f} MiB with all, who joined in {float(joined_s):.1f} s"
            line += f"; {float(request_us):.0f} us of the server a request"
            members.communicate()
        server.communicate()
        print(line, flush=True)


if __name__ == "__main__":
    main()
