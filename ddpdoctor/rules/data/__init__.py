"""Rules about how ranks share out the data."""
