"""A second reading of the specification: exact, scalar, slow, standard library only.

Nothing here imports `ninfer_convert`, so agreement between the two is evidence. Values are `Fraction`s,
words are integers, and every rounding happens in `binary`. `fast` finds the same codes with tables of
thresholds, each of which the plain encoder has decided.
"""
