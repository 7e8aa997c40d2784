"""Gluon kernels for Hopper (sm_90)."""
