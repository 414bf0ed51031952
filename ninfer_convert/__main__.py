"""`python -m ninfer_convert` is `ninfer-convert`."""

from ninfer_convert.cli import main

main()
