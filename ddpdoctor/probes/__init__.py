"""Programs that run in a Python of their own, with torch."""
