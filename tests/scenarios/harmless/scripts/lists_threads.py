"""Waits for all threads but its own, and counts them."""

import atexit
import threading

print(threading.active_count())
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
atexit.register(print, "last")
threading.Thread(target=lambda: print("joined at exit")).start()
