"""What may be on the device when: layerwise, model-level and split offload, built from one engine."""
