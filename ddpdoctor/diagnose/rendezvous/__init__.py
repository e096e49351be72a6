"""`check-rendezvous` from end to end: the nodes meet, look at each other, and the one that serves the room judges."""
