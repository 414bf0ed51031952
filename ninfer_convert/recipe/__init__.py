"""The recipe language: YAML to a `Recipe`, frozen data that knows no checkpoint."""
