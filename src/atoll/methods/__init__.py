"""Methods: one module each, composed of objectives, terms, merges, aggregations and server steps."""
