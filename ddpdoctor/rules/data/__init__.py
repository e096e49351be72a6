"""Rules about how the data is divided among ranks."""
