"""Objectives: the losses that clients minimise."""
