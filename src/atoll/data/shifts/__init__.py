"""Shifts of the clients' images: rotation, style, corruption."""
