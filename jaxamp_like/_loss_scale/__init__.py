"""Dynamic loss scaling: the cure for gradients that underflow in float16.

The loss is multiplied by a scale before differentiation, and the gradients are divided
by it afterwards, both in float32. The scale is a small state that goes in and out of
each step: it falls when gradients overflow, and creeps up while they don't. A step is a
pure function of the state and keeps its types, so a jitted step compiles once.

The scheme is that of Micikevicius et al., "Mixed Precision Training"
(arXiv:1710.03740), section 3.2."""
