"""Images: sources, partition over clients, and augmented views."""
