"""The contents of reports: records, totals and text, without views and tracing."""
