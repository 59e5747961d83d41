"""Partition of images over clients."""
