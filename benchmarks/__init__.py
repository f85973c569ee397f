"""Benchmarks: ratios from one run, printed as a table and written as JSON."""
