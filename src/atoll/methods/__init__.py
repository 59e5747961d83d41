"""Methods: one file each, composed of the parts of the floor below."""
