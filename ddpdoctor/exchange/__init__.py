"""How facts travel between ranks and nodes: their form on the way, where processes meet, tokens, limits."""
