"""Certificates: whether the compiled program runs in the precision that was decided."""
