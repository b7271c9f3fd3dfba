"""Parts of ``bench_decoders.py``."""
