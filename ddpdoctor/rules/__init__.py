"""The rules: they turn facts into findings and do no I/O."""
