"""Rules of `check-env`: each takes facts about nodes and returns an answer. The registry loads every module here."""
