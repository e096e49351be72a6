"""The steps of `check-rendezvous`: the nodes meet and check each other, and the serving node judges."""
