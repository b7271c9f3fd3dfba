"""Data, encodings and pipelines of the comparisons of fine-tuning."""
