"""Generation with decoders: selective batching, iteration-level scheduling, and streams of tokens."""

from chrion.generation.generator import Generator, GeneratorStatistics
from chrion.generation.sampling import Sampling
from chrion.generation.streams import Stream, Token

__all__ = ["Generator", "GeneratorStatistics", "Sampling", "Stream", "Token"]
