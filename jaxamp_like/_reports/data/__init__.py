"""What reports hold: records, totals, and their text. Knows no view and no tracing."""
