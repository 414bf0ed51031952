"""The read side: an artifact opened, decoded, verified, made again, compared and exported."""
