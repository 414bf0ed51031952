"""Checkpoints: headers, names and the bytes of tensors, from directories, files and the hub."""
