"""What everything stands on: configuration, trees, files, run folders, randomness."""
