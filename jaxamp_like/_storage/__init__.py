"""Numbers that are stored in few bits between steps: an optimizer's state, parameters.

`formats` says how a number becomes a code, and `codes` holds an array as such codes,
with a scale for each block. `moments` finds what of an optimizer's state may be stored
so, `optimizer` wraps the optimizer, and `updates` adds updates to parameters that have
no float32 copy. `mean` averages gradients over devices, which send each other codes."""
