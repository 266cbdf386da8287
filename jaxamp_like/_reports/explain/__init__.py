"""`explain`: which precision each equation of a function runs in, and why."""

from .explain import explain as explain
