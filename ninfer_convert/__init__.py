"""Turns safetensors checkpoints into `.ninfer` artifacts; `ninfer-convert --help` is the command line."""

__version__ = "0.1.0"
