"""The rules of `check-env`. Each takes facts about nodes and returns an answer. The registry loads every module
here."""
