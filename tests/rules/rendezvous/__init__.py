"""Tables of the rules of `check-rendezvous`."""
