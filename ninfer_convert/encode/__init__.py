"""Words to plane bytes: the compiled kernels and their checked wrappers."""
