"""Engines: run the clients of a federation, in one process, in several, or over a network."""
