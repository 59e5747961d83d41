"""Fine-tuning an encoder for object detection and instance segmentation, and its average precision."""
