"""Policies: which rule an equation gets, by its primitive and its scope.

`classes` is the table behind the default policy. `dictionary` says what the keys of a
policy dict mean, and `frozen` checks such a dict and looks rules up in it. `named`,
`names` and `policy_map` are policies as users write them, and `presets` are those of
other systems. `settings` reads the arguments of `amp`. `codec` saves policies, and
`limit` says where they hold. All of this is built on `_rules` and `_structural`, and
knows nothing of programs."""
