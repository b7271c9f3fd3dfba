"""Tables, pictures and pages of plans, measurements and simulations."""

__all__: list[str] = []
