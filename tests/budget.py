"""How far a result may be from the exact one: the rule of `parity.budget`, for NumPy arrays."""

from nsa_jax.doctor.budget import allowance, distance, size

__all__ = ["allowance", "distance", "size"]
