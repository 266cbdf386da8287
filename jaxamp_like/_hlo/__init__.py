"""Reads HLO, the text in which XLA writes programs down."""
