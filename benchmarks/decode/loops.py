"""Steps of several layers in one compiled loop, as in a model that decodes: no step waits for the host."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.decode.inputs import NUM_STEPS, Setting
from benchmarks.decode.steps import Program
from nsa_jax.array_typing import Array


class Decoding:
    """`num_layers` layers, each with its own cache, that take `num_steps` steps a call, in place.

    A layer's output is the next layer's input, and that of the last layer the first one's in the next step:
    nothing is dead, and nothing can be computed before the loop. After `NUM_STEPS` steps it starts again at
    `S`, with rings that hold other tokens by then: the numbers are others, the work is the same. The lengths
    come with each call, so that the host resets nothing.
    """

    def __init__(self, program: Program, setting: Setting, num_layers: int, num_steps: int = NUM_STEPS):
        assert NUM_STEPS % num_steps == 0
        self.first, self.x, self.num_steps, self.taken = program.x, program.x, num_steps, 0
        self.states, self.operands = zip(*map(program.draw, range(num_layers)), strict=True)
        self.lengths = [
            jnp.full(setting.shape.batch, setting.shape.length + step * setting.new_tokens, jnp.int32)
            for step in range(0, NUM_STEPS, num_steps)
        ]

        def take(states: tuple[Any, ...], lengths: Array, x: Array, operands: tuple[Any, ...]) -> Any:
            def body(_: Any, carry: tuple[Any, Array]) -> tuple[Any, Array]:
                states, x = carry
                after = []
                for state, own in zip(states, operands, strict=True):
                    x, state = program.step(state, x, own)
                    after.append(state)
                return tuple(after), x

            states = tuple(state._replace(lengths=lengths) for state in states)
            return jax.lax.fori_loop(0, num_steps, body, (states, x))

        arguments = (self.states, self.lengths[0], self.x, self.operands)
        compiled = timing.compile_for(take, arguments, donate=0)
        self.compiled = dataclasses.replace(compiled, arguments=())  # which go on changing

    def run(self) -> Array:
        """One call, not waited for; returns what the last layer gave last."""
        x = self.x if self.taken else self.first
        lengths = self.lengths[self.taken // self.num_steps]
        self.states, self.x = self.compiled.call(self.states, lengths, x, self.operands)
        self.taken = (self.taken + self.num_steps) % NUM_STEPS
        return self.x
