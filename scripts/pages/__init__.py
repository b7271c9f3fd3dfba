"""Sections of documentation pages that come from the code and from results of measurements."""
