"""The exchange of facts between ranks and nodes: message format, meeting places, tokens, limits."""
