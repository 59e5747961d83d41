"""Engines: who runs which client, and where."""
