"""Comparative benchmarks: the contenders, the runner that times them, and the CSV files of results."""
