"""`gdpa train`: the loop, its optimisers, metrics, data sources and checkpoints."""
