"""Facts in, findings out, no I/O."""
