"""A recipe and its sources become a plan: every value bound, every check made, every offset known."""
