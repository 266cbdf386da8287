"""Numbers that are stored in few bits between steps: an optimizer's state, parameters.

`formats` says how a number becomes a code, `tiles` how an array is laid in blocks that
have a scale each, and `codes` holds an array as such codes. `moments` finds what of an
optimizer's state may be stored so, `optimizer` wraps the optimizer, and `updates` adds
updates to parameters that have no float32 copy."""
