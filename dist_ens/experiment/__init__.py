"""The config door: from a stored description of a run to its ensemble, data and checkpoints."""
