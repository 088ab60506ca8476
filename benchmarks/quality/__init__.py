"""What a token budget costs in quality, and which method loses least: ``python -m benchmarks.quality``."""
