"""Parts of ``scripts/bench_serving.py``: models, processes that serve, what surrounds them, and statistics."""
