"""Objectives: the local losses."""
