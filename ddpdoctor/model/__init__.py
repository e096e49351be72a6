"""What is known: facts, findings, the report. No I/O."""
