"""Drafts of recipes: from the headers of a checkpoint to the text of a recipe that converts it."""
