"""Makes the data that pictures of a job are drawn from: timeline, waits and source."""
