"""The papers' tables and figures: their rows, scales and published values."""
