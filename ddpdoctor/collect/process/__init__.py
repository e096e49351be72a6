"""Other processes: their state, connections and locks, and how they ended."""
