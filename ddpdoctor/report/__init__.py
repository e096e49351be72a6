"""Reports in, text out; one file a format."""
