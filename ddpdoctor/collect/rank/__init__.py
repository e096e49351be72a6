"""Facts about one rank: what it recorded, and what else the run folder holds about it."""
