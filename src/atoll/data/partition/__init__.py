"""Which client holds which image."""
