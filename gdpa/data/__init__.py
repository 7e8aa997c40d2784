"""Training data: one schema of an example, a generator of click traffic, Parquet files, a converter, jagged lengths."""
