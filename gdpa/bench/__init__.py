"""The benchmark: cases (what is computed), providers (who computes it), timing (how), run (in which order), report."""
