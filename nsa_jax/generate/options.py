"""How tokens are chosen and what ends a row, as a program takes it."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax

from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.generate import checks, ends, parameters

type PerRow = float | int | Float[Array, " B"] | Int[Array, " B"]

# From logits [B, vocab], the newest token of each row and the number of tokens drawn so far, to logits.
LogitsHook = Callable[[Array, Array, Array], Array]


class Sampling(NamedTuple):
    """Sampling parameters, of all rows or of each. They are traced, so other values need no other program.

    Only None does, because it leaves out the operations of that parameter.
    """

    temperature: PerRow | None = None
    top_k: PerRow | None = None
    top_p: PerRow | None = None
    min_p: PerRow | None = None
    repetition_penalty: PerRow | None = None
    presence_penalty: PerRow | None = None

    @classmethod
    def make(cls, temperature: Any, top_k: Any, top_p: Any) -> "Sampling":
        """Checks numbers for all rows. Raises TypeError or ValueError unless they are in range and of use."""
        parameters.check_sampling(temperature, top_k, top_p)
        if not temperature:
            return cls()
        # Converted to one type each: a NumPy scalar, or 1 for 1.0, would need another program.
        top_k = None if top_k is None else int(top_k)
        return cls(float(temperature), top_k, None if top_p is None else float(top_p))

    @classmethod
    def of_rows(cls, batch: int, **given: Any) -> "Sampling":
        """Checks numbers for all rows, or arrays with one for each. Raises TypeError or ValueError."""
        found = {name: parameters.check_parameter(name, x, batch) for name, x in given.items()}
        if isinstance(found["temperature"], float) and found["temperature"] == 0:
            parameters.check_greedy(**found)
            found["temperature"] = None
        return cls(**found)

    @classmethod
    def of_request(cls, names: Collection[str], **given: Any) -> "Sampling":
        """Checks numbers for one row, and returns those of these `names` as arrays `[1]`.

        Raises TypeError or ValueError as `of_rows`, or if another one is given.
        """
        cls.of_rows(1, **given)
        neutral = parameters.NEUTRAL
        found = {name: neutral[name] if x is None else x for name, x in given.items()}
        if others := [name for name, x in found.items() if name not in names and x != neutral[name]]:
            raise ValueError(
                f"sampling of the Batcher must have all that a request uses, got sampling={tuple(names)} and "
                f"a request with {', '.join(others)}. Build the Batcher with more, or leave these out."
            )
        each: dict[str, Any] = {name: parameters.as_row(name, found[name]) for name in names}
        return cls(**each)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """How tokens are chosen, and what ends a row."""

    sampling: Sampling
    eos_id: Any = None
    pad_id: int = 0
    stop: Any = None
    drafts: Any = None
    logprobs: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    logits_hook: LogitsHook | None = dataclasses.field(default=None, metadata=dict(static=True))

    @classmethod
    def make(
        cls, sampling: Sampling, eos_id: Any, pad_id: Any, *, stop: Any = None, drafts: Any = None,
        logprobs: Any = None, logits_hook: Any = None,
    ) -> "Options":  # fmt: skip
        """Checks the options. Raises TypeError or ValueError unless they are of their kind and in range."""
        eos_id = checks.check_tokens(eos_id, pad_id)
        if stop is not None:
            stop = ends.stop_table(checks.check_stop(stop))
        checks.check_reports(logprobs, logits_hook)
        logprobs = None if logprobs is None else int(logprobs)
        return cls(sampling, eos_id, int(pad_id), stop, drafts, logprobs, logits_hook)
