"""What takes the time of a step, and which one change recovers most of it."""
