"""Views of a report: the HTML page and its charts, and tables for the terminal."""
