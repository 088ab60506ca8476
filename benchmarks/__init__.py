"""Measurements: quality and speed against peers. Not installed with the package; run from a source checkout."""
