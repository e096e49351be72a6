"""The machine itself: processors, memory, limits, clock, file systems, and the software on it."""
