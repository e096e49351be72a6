"""Where the main thread is, and how it ended: stacks, errors, waits."""
