"""Rules over how data is shared out among ranks."""
