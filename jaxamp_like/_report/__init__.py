"""Reports: what the rewrite did (`explain`), and what became of the numbers."""
