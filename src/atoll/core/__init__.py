"""Foundations of all other packages: configuration, trees, files, run folders, randomness."""
