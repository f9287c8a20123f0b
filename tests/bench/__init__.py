"""Benchmarks: what Stratum costs, measured beside what it is compared with."""
