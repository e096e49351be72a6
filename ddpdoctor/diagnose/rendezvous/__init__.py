"""`check-rendezvous` from end to end: the nodes meet and look at each other, and the one that serves judges."""
