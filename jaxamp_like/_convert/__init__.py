"""Conversion for inference: parameters stored as they are read, and what ships them.

`uses` tells how each parameter is read, `storage` decides how it is stored, `program`
rewrites the function for that, `convert` puts it together for models as they are
(`models`) under op lists (`lists`). `artifact` saves and loads, `cli` is the command
line."""
