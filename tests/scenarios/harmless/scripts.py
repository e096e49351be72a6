"""Scripts that do what scripts do to their process: each function is one, with its imports, and says how it went."""


def becomes_another():
    """Calls exec on itself, as scripts do that must set a variable before the start."""
    import os
    import sys

    if "SECOND" not in os.environ:
        print("first", flush=True)
        os.environ["SECOND"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    print("second", os.environ["RANK"])


def changes_masks():
    """Changes its directory and its umask, and makes files with modes that it relies on."""
    import os
    from pathlib import Path

    os.chdir(os.environ["WORK"])
    for mask in (0, 0o777, 0o027):
        os.umask(mask)
        Path(str(mask)).touch()
        print(oct(Path(str(mask)).stat().st_mode), flush=True)
    child = os.fork()
    if child == 0:
        os._exit(os.umask(0))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def changes_root():
    """Has another root, in which there is no run folder and no Python."""
    import os
    from pathlib import Path

    os.chroot(os.environ["WORK"])
    os.chdir("/")
    print(list(Path("/").iterdir()), flush=True)
    child = os.fork()
    if child == 0:
        print("child", flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def changes_user():
    """Becomes nobody, for whom the run folder is closed."""
    import os

    os.setgid(65534)
    os.setuid(65534)
    print(os.geteuid(), flush=True)
    child = os.fork()
    if child == 0:
        print("child", os.geteuid(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    raise SystemExit(2)


def closes_all_files():
    """Closes all files that it did not open, as daemons do, and opens its own: they get the numbers of those closed."""
    import os
    import signal
    from pathlib import Path

    os.closerange(3, 65536)
    os.chdir(os.environ["WORK"])
    files = [Path(str(number)).open("w+") for number in range(60)]  # noqa: SIM115 - closed below
    child = os.fork()
    if child == 0:
        for file in files:
            file.write("child\n")
            file.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for file in files:
        file.seek(0)
        text = file.read()
        file.write("parent\n")
        file.close()
        assert text == "child\n", (file.name, text)
    print(len(files), "files kept", flush=True)
    signal.raise_signal(signal.SIGBUS)


def deletes_its_folder():
    """Deletes its working directory while it works in it, and cannot say where it is."""
    import os
    import shutil
    from pathlib import Path

    os.chdir(os.environ["WORK"])
    shutil.rmtree(os.environ["WORK"])
    try:
        Path.cwd()
    except FileNotFoundError as error:
        print(error)
    import json

    print(json.dumps([1]))


def dies_of_sigterm():
    """Has no handler, and dies of SIGTERM."""
    import os
    import signal

    print(signal.getsignal(signal.SIGTERM), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def fails_in_its_text():
    """Raises an error whose text cannot be had."""

    class BrokenError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    print("raises", flush=True)
    raise BrokenError


def _fail(text):
    raise ValueError(text)


def forks():
    """Forks: a child that works on and exits, one that runs another program, and those of multiprocessing."""
    import multiprocessing
    import os
    import sys

    def wait(pid):
        print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

    child = os.fork()
    if child == 0:
        print("child works", sum(range(1000)), flush=True)
        sys.exit(3)
    wait(child)
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", "print('another program')"])
    wait(child)
    child = os.fork()
    if child == 0:
        os._exit(4)
    wait(child)
    for method, target, argument in (("fork", _fail, "text"), ("spawn", sys.exit, 5), ("spawn", os._exit, 6)):
        process = multiprocessing.get_context(method).Process(target=target, args=(argument,), name="worker")
        process.start()
        process.join()
        print("process ended with", process.exitcode, flush=True)


def handles_signals():
    """Has handlers of its own for signals, put in place twice, here and in a child, and one that raises."""
    import os
    import signal
    import sys
    import traceback

    NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGINT, signal.SIGCHLD)

    def first(number, frame):
        print("first", number, frame.f_code.co_name, frame.f_lineno)

    def second(number, frame):
        print("second", number, frame.f_code.co_name)
        first(number, frame)

    def main():
        for handler in (first, second):
            for number in NUMBERS:
                before = signal.signal(number, handler)
                print(number, getattr(before, "__name__", before))
            for number in NUMBERS:
                os.kill(os.getpid(), number)

    def be_the_child():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGURG)
        os.kill(os.getpid(), signal.SIGTERM)
        print(signal.getsignal(signal.SIGURG).__name__, flush=True)
        os._exit(0)

    def raises(number, frame):
        raise TimeoutError(f"{number} in {frame.f_code.co_name}")

    def is_interrupted():
        signal.signal(signal.SIGUSR1, raises)
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except TimeoutError:
            traceback.print_exc(file=sys.stdout)
        print(signal.signal(signal.SIGUSR1, signal.SIG_IGN) is raises, signal.getsignal(signal.SIGUSR1))

    main()
    is_interrupted()
    print(os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1]), flush=True)
    # Fork and wait share a line: the handler prints the line it interrupts, and the child may end before the wait.
    os.waitpid(os.fork() or be_the_child(), 0)


def has_faulthandler():
    """Uses faulthandler in every way that it has, and then ends by a fatal signal."""
    import faulthandler
    import os
    import signal
    import sys

    print(faulthandler.is_enabled(), faulthandler.disable(), faulthandler.is_enabled())
    faulthandler.enable()
    print(faulthandler.is_enabled(), faulthandler.disable(), faulthandler.is_enabled())
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
    os.kill(os.getpid(), signal.SIGUSR1)
    print(faulthandler.unregister(signal.SIGUSR1), faulthandler.unregister(signal.SIGUSR1))
    faulthandler.dump_traceback_later(1000)
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback(all_threads=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(all_threads=False)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print(faulthandler.is_enabled(), flush=True)
        signal.raise_signal(signal.SIGSEGV)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    signal.raise_signal(signal.SIGABRT)


def has_few_files():
    """Runs where few files may be open, trains, and needs every one of them."""
    import os
    import resource
    import sys

    MOST = 24
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] != MOST:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, MOST))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = []
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            print(error, len(held))
    dist.destroy_process_group()


def hooks_exceptions():
    """Has hooks of its own for exceptions, and cares whether others have."""
    import sys
    import threading
    import traceback

    print(sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__)

    def fail(text):
        raise LookupError(text) from KeyError("cause")

    def in_thread():
        thread = threading.Thread(target=fail, args=("thread",), name="t")
        thread.start()
        thread.join()

    in_thread()
    previous = sys.excepthook, threading.excepthook

    def hook(kind, error, trace):
        print(
            "hook", kind, error, [(f.name, f.lineno) for f in traceback.extract_tb(trace)], trace is error.__traceback__
        )
        sys.__excepthook__(kind, error, trace)
        previous[0](kind, error, trace)

    def thread_hook(args):
        print("thread", args.exc_type, args.exc_value, args.thread.name, len(traceback.extract_tb(args.exc_traceback)))
        previous[1](args)

    sys.excepthook, threading.excepthook = hook, thread_hook
    in_thread()
    fail("main")


def interrupted():
    """Is interrupted, and dies of KeyboardInterrupt with its traceback."""
    import os
    import signal

    print("at work", flush=True)
    os.kill(os.getpid(), signal.SIGINT)


def leaves_at_once():
    """Leaves by os._exit, with text in a buffer that is never written."""
    import os
    import sys

    print("seen", flush=True)
    sys.stdout.write("lost")
    os._exit(9)


def lists_threads():
    """Waits for all threads but its own, and counts them."""
    import atexit
    import threading

    print(threading.active_count())
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
    atexit.register(print, "last")
    threading.Thread(target=lambda: print("joined at exit")).start()


def traces():
    """Traces and profiles its own functions, in all threads."""
    import sys
    import threading

    seen = []

    def tracer(frame, event, _argument):
        if frame.f_code.co_filename == __file__ or "recorder" in frame.f_code.co_filename:
            seen.append((frame.f_code.co_name, frame.f_lineno, event))
        return tracer

    def work(n):
        total = 0
        for i in range(n):
            total += i
        return total

    for put in (sys.settrace, sys.setprofile, threading.settrace, threading.setprofile):
        put(tracer)
        work(3)
        thread = threading.Thread(target=work, args=(2,))
        thread.start()
        thread.join()
        put(None)
    for entry in seen:
        print(*entry)
    if hasattr(sys, "monitoring"):
        events = sys.monitoring.events
        sys.monitoring.use_tool_id(3, "own")
        sys.monitoring.register_callback(3, events.LINE, lambda code, line: print("line", code.co_name, line))
        sys.monitoring.set_local_events(3, work.__code__, events.LINE)
        work(2)
    try:
        sys.exit("caught")
    except SystemExit:
        import traceback

        traceback.print_exc()


def uses_up_files():
    """Opens files up to its limit, and goes on."""
    import os
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        print(error)
    child = os.fork()
    if child == 0:
        print("child", flush=True)
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    import sys

    globals()[sys.argv[1]]()
