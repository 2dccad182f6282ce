"""The parts of ``benchmarks/kernel_table.py``."""
