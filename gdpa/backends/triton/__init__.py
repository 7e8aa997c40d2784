"""Portable Triton kernels. Start at backend.py; then forward.py and backward.py (the kernels) and launch.py (how they are called)."""
