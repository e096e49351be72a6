"""Jobs over several hosts, each wrapped on its own."""
