"""Options of onnxruntime, and their effect on a session that is cut into segments."""

__all__: list[str] = []
