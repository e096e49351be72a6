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
