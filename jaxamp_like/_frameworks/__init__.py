"""What frameworks bring that JAX does not know: NNX objects, scopes of modules."""
