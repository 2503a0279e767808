"""A small data set of TFDS, for the tests."""
