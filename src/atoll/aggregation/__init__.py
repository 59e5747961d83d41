"""Aggregations: folds of client updates into the next global model."""
