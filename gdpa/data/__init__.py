"""Data that looks like production's: jagged lengths from seeded generators."""
