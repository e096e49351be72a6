"""ddpdoctor in jobs and tests that are not wrapped: a function for scripts, callbacks, a pytest plugin."""
