"""Augmented views of images."""
