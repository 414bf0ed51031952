"""Checkpoints of the right shape with made-up weights, for the demonstration and for tests."""
