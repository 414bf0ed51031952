"""Formats for the objects of a recipe, chosen so that the artifact fits a size."""
