"""Tables and figures of papers, computed by Chrion, for ``scripts/reproduce.py``."""
