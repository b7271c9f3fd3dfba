"""Parts of ``scripts/bench_serve.py``."""
