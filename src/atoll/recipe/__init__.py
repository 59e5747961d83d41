"""One validated description of a run."""
