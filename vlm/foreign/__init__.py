"""Models that no family claims, and transformers runs."""
