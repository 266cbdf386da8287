"""Handles what JAX does not know of frameworks: NNX objects, scopes of modules."""
