"""Aggregation: how client updates become the next global model."""
