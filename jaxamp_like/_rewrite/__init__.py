"""The rewrite: a plan for every equation, and the program that comes of it.

`planner` decides, knowing by `reach` and `solvers` how values flow; `remat` says what
the backward pass runs again; `bind` emits the equations. `record` tells a report what
was done, and `findings` warns the user of what can't have been meant."""
