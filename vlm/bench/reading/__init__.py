"""What the accuracy benchmark reads beside the narrow domain."""
