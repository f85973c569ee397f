"""The page of operators: three files that a browser loads, and nothing from another host."""
