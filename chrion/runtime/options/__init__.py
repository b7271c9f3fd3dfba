"""Options: how each of onnxruntime's options is applied to a session that is cut into segments."""

__all__: list[str] = []
