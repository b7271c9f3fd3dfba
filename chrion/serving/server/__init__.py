"""A model server: many models on little memory, behind the Open Inference Protocol v2 (extra ``serve``)."""

__all__: list[str] = []
