"""How loaders share out data."""
