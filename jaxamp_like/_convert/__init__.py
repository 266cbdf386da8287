"""Conversion for inference: parameters stored as they are read, and what ships them.

A call of `convert` takes a model apart (`models`), traces what `amp` makes of it under
the user's lists of ops (`lists`, `traced`), finds out how each parameter is read
(`uses`) and decides how it is stored (`storage`). What is made of parameters that are
read in 8 bits takes their place (`splitting`, `folding`). The result (`converted`, with
a `summary` of `records`) runs the program on narrower inputs (`rewriting`).

`artifact` saves and loads a converted model: the files of a `folder`, arrays
(`tensors`), arguments and results (`trees`), and a program that is checked for calls of
native code (`native`). `checkpoint` saves parameters alone. `cli` is the command line.
"""
