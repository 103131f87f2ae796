"""Small, real pipelines with random weights, and the writers for their outputs."""
