"""Images with annotated objects, for detection and instance segmentation."""
