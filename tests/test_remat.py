"""`nsa_jax.remat.SAVED_NAMES` are the names that the Triton operations give to their results.

They are read from the source, so the test needs no Triton.
"""

import ast
import pathlib

from nsa_jax.remat import SAVED_NAMES

OPERATIONS = pathlib.Path(__file__).resolve().parent.parent / "nsa_jax/kernels/triton/operations.py"


def named_by(source: str) -> tuple[tuple[str, ...], set[str]]:
    """The literal `SAVED_NAMES` of a module, and the names that its calls of `checkpoint_name` give."""
    listed, given = (), set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=[ast.Name(id="SAVED_NAMES")], value=value):
                listed = ast.literal_eval(value)
            case ast.Call(func=ast.Name(id="checkpoint_name"), args=[_, ast.Constant(value=name)]):
                given.add(name)
    return listed, given


def test_saved_names_are_those_of_the_kernels():
    listed, given = named_by(OPERATIONS.read_text(encoding="utf-8"))

    assert listed == SAVED_NAMES
    assert given == set(SAVED_NAMES)
