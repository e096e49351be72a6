"""Facts about the machine: processors, memory, limits, clock, file systems and software."""
