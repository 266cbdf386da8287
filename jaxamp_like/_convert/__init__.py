"""Conversion for inference: parameters are stored in the dtypes that they are read in.

A call of `convert` takes a model apart (`models`), traces what `amp` makes of it under
the user's lists of ops (`lists`, `traced`), finds out how each parameter is read
(`uses`) and decides how it is stored (`storage`). A parameter that a rule rounds to 8
bits is replaced by the numbers and scales that the rule makes of it (`splitting`,
`folding`). The result (`converted`, with a `summary` of `records`) runs the program on
narrower inputs (`rewriting`).

`artifact` saves and loads a converted model: the files of a `folder`, arrays
(`tensors`), arguments and results (`trees`), and a program that is checked for calls of
native code (`native`). `checkpoint` saves parameters alone. `cli` is the command line.
"""
