"""How tokens are chosen and what ends a row, as a program takes it."""

from typing import Any, NamedTuple

from nsa_jax.generate import checks


class Sampling(NamedTuple):
    """Sampling parameters. They are traced, so that other values need no other program.

    Only None does, because it leaves out the operations of that parameter.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None

    @classmethod
    def make(cls, temperature: Any, top_k: Any, top_p: Any) -> "Sampling":
        """Checks the parameters. Raises TypeError or ValueError unless they are in range and have a use."""
        checks.check_sampling(temperature, top_k, top_p)
        if not temperature:
            return cls(None, None, None)
        # Converted to one type each: a NumPy scalar, or 1 for 1.0, would need another program.
        top_k = None if top_k is None else int(top_k)
        return cls(float(temperature), top_k, None if top_p is None else float(top_p))


class Options(NamedTuple):
    """How tokens are chosen, and what ends a row."""

    sampling: Sampling
    eos_id: int | None
    pad_id: int

    @classmethod
    def make(cls, sampling: Sampling, eos_id: Any, pad_id: Any) -> "Options":
        """Checks the ids. Raises TypeError or ValueError unless they are ids."""
        checks.check_tokens(eos_id, pad_id)
        return cls(sampling, None if eos_id is None else int(eos_id), int(pad_id))
