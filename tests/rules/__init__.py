"""Tables: facts in, exact findings out."""
