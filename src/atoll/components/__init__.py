"""Base classes of a method's components, and the types that they exchange."""
