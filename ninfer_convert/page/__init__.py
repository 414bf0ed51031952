"""One HTML page about an artifact."""
