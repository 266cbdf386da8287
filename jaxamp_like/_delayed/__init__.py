"""Delayed scaling with a state that goes in and out: `amp_with_state`.

`value_numbering` tells which values of a program are one and the same, and `tensors`
which tensors have a history (a tensor has one, whoever reads it). `threaded` runs a
program whose scales are given and whose maxima come out, `residuals` lets its backward
pass keep less, and `state` is what is kept from step to step."""

from .stateful import amp_with_state as amp_with_state, init_amp_state as init_amp_state
