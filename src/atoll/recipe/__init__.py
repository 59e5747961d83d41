"""Recipes: validated descriptions of runs."""
