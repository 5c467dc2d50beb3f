"""Vision encoder: SigLIP tower, connectors, visual-token cache, cross-request batcher."""
