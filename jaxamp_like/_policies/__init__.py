"""Policies: which rule an equation gets, by its primitive and its scope.

`classes` is the table behind the default policy, `dictionary` the policy dict, checked
and looked up; `named`, `names` and `policy_map` are policies as users write them,
`presets` those of other systems, `settings` what comes of the arguments of `amp`. They
are saved by `codec` and hold only where `limit` says. Built on `_rules` and
`_structural`; knows nothing of programs."""
