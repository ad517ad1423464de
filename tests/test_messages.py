"""Every error message of the source has the form of the house, also those that no test provokes."""

import ast
import functools
import itertools
import pathlib
from collections.abc import Iterator

import pytest
from messages import has_form

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("nsa_jax", "nsa_torch_ref", "parity", "benchmarks", "examples")
# Not errors of a caller: the exit status, why a benchmark row is not measured, a signal, and the end of an
# iterator.
NOT_ERRORS = ("SystemExit", "Refused", "Interrupted", "StopIteration")
# What these end in has the form itself.
END_IN_A_MESSAGE = [
    "examples/serve/__main__.py: str(error)",  # what the library says of the source, and of sizes
    "examples/serve/api.py: str(error)",  # what it says of a request
    "examples/serve/api.py: str(error).replace('max_new_tokens', 'max_tokens')",
    "examples/train_lm/run_folder.py: --resume must find a whole checkpoint of this run: {error}",
    "examples/train_lm/settings.py: the sizes must make a model, got one that cannot be: {error}",
    *["nsa_jax/adopt/__main__.py: in_options(error)"] * 2,  # what the library says of the source
    "nsa_jax/adopt/run_folder.py: str(error)",
    "nsa_jax/adopt/settings.py: in_options(error)",
    "nsa_jax/dispatch.py: {operation} cannot run as {named}: {reason}",
    "nsa_jax/pretrained/chat_format.py: message",  # what a chat template refuses, inside its own error
]


def texts(node: ast.expr, scope: ast.Module) -> list[str]:
    """What a message may say, with the values that are put into it as `{source}`.

    A value that is a constant of the file, or an argument that its calls in the file give as one, is put in.
    """
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(pair) for pair in itertools.product(texts(left, scope), texts(right, scope))]
        case ast.JoinedStr(values=values):
            return ["".join(parts) for parts in itertools.product(*(texts(part, scope) for part in values))]
        case ast.FormattedValue(value=ast.Name(id=name)):
            return constants(name, scope) or [f"{{{name}}}"]
        case ast.FormattedValue(value=value):
            return [f"{{{ast.unparse(value)}}}"]
    return [ast.unparse(node)]


@functools.cache
def nodes(scope: ast.Module) -> list[ast.AST]:
    kinds = ast.Raise | ast.Call | ast.Assign | ast.FunctionDef
    return [node for node in ast.walk(scope) if isinstance(node, kinds)]


def constants(name: str, scope: ast.Module) -> list[str]:
    """Strings that `name` stands for in a file: assigned to it, or given to the parameter of that name."""
    found, places = [], {}
    for node in nodes(scope):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                found.append(value)
            case ast.FunctionDef(name=function, args=ast.arguments(args=arguments)):
                names = [argument.arg for argument in arguments]
                if name in names:
                    places[function] = names.index(name)
    for node in nodes(scope):
        match node:
            case ast.Call(func=ast.Name(id=function), args=arguments) if function in places:
                found += arguments[places[function] : places[function] + 1]
    strings = [value for value in found if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return [value.value for value in strings] if len(strings) == len(found) else []


def messages(source: str) -> Iterator[str]:
    """The messages of everything that a file raises or checks."""
    scope = ast.parse(source)
    for node in nodes(scope):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=kind) | ast.Attribute(attr=kind), args=arguments)):
                if kind not in NOT_ERRORS:
                    yield from texts(arguments[0], scope) if arguments else [f"{kind}()"]
            case ast.Raise(exc=ast.Name(id=name)) if name not in NOT_ERRORS:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="checkify"), attr="check"), args=[_, text]):
                yield from texts(text, scope)


def without_form(path: str, source: str) -> list[str]:
    return [f"{path}: {text}" for text in messages(source) if "\n" in text or not has_form(text)]


def test_every_message_names_rule_value_and_remedy():
    wrong = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        wrong += without_form(name, source)

    assert sorted(wrong) == END_IN_A_MESSAGE


GOOD = "a must be 1, got {a}. Pass 1."
BAD = {
    "no value": "raise ValueError('a must be 1. Pass 1.')",
    "no remedy": "raise ValueError(f'a must be 1, got {a}.')",
    "no full stop": "raise ValueError(f'a must be 1, got {a}. Pass 1')",
    "no imperative": "raise ValueError(f'a must be 1, got {a}. It is always 1.')",
    "two lines": "raise ValueError(f'a must be 1, got {a}. ' + 'Pass\\n1.')",
    "no message": "raise ValueError()",
    "not even a call": "raise ValueError",
    "not a text": "raise ValueError(why)",
    "of a module": "raise argparse.ArgumentTypeError('a must be 1')",
    "check": "checkify.check(a == 1, 'a must be 1')",
    "one remedy of two": "def f(fix):\n  raise ValueError(f'a is 1, got {a}. {fix}')\nf('Pass 1.')\nf('1.')",
    "unknown remedy": "def f(remedy):\n  raise ValueError(f'a is 1, got {a}. {remedy}')\nf(g())",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD.keys())
def test_messages_without_the_form_are_found(source):
    assert len(without_form("a.py", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        f"raise ValueError(f'{GOOD}')",
        f"raise ValueError(f'{GOOD[:10]}' f'{GOOD[10:]}')",
        f"checkify.check(ok, '{GOOD}', a=a)",
        "R = 'Pass 1'\nraise ValueError(f'a must be 1, got {a}. {R}.')",
        "def f(b, remedy):\n  raise ValueError(f'a is 1, got {a}. {remedy}')\nf(1, 'Pass 1.')",
        "raise",
        "raise SystemExit(main())",
    ],
)
def test_messages_with_the_form_are_accepted(source):
    assert without_form("a.py", source) == []
