"""Methods: one file each, composed of the components of the floor below."""
