"""Comparative benchmarks: who is measured (contenders), by whom (runner), and the CSV files that keep the results."""
