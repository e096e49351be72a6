"""The recorder, which ``wrap`` loads into the ranks. It imports nothing else of ddpdoctor and nothing heavy."""
