"""The user's own loaders, asked for their indices on every rank."""
