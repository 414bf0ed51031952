"""A conversion by the workers of a Dask cluster: what they are told, what they do, and who gives it out."""
