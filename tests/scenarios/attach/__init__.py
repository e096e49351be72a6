"""Real jobs that nobody prepared, seen from outside."""
