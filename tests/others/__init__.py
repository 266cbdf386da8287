"""Other people's test suites, run with their functions under `amp`.

    python -m tests.others optax haiku                # installed packages
    python -m tests.others ../equinox/tests           # checkouts, by path

Each suite runs three times: as written; with every function that a test hands to one of
JAX's transforms under `amp` with an empty policy; and under `amp` in bfloat16. With an
empty policy, each test must end as it does as written. In bfloat16 it may also fail by
an assertion, since numbers differ; any other exception is a finding."""
