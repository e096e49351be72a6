"""A store in this process, for what travels by way of somebody else's."""

import threading

from ddpdoctor.exchange.store import StoreError


class Shelf:
    """A ``Store`` that keeps everything it was ever asked to set."""

    def __init__(self):
        self.values = {}
        self.history = []
        self.ended = False
        self.closed = 0
        self._lock = threading.Lock()

    def set(self, key, value):
        with self._lock:
            self._check()
            self.values[key] = value
            self.history.append((key, value))

    def get(self, key):
        with self._lock:
            self._check()
            return self.values.get(key)

    def add(self, key, amount):
        with self._lock:
            self._check()
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = b"%d" % total
            return total

    def close(self):
        self.closed += 1

    def _check(self):
        if self.ended:
            raise StoreError("the store has ended")
