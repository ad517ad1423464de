"""`python -m examples.serve RUN`: serves a model to the clients of OpenAI.

RUN is the folder of a run of nsa_jax.adopt, or whatever nsa_jax.pretrained.load takes. Ctrl-C and SIGTERM end
what is being written, and the server. Exit code 2: bad input; 130 or 143: Ctrl-C or SIGTERM.
"""

import pathlib
import sys
from typing import Any

from benchmarks.command_line import InputError, Parser, command, missing_package, progress
from nsa_jax.chat.run import open_run
from nsa_jax.generate import Batcher

PROGRAM = "examples.serve"


@command(PROGRAM)
def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse_args(arguments)
    if not 0 <= options.port < 2**16:
        raise InputError(f"--port must be at least 0 and below 65536, got {options.port}. Pass another.")
    try:  # said at once, not after the model is loaded
        from examples.serve.api import Api, Server
    except ImportError as error:
        return missing_package(PROGRAM, error, "serve")
    sizes = dict(slots=options.slots, max_length=options.max_length, max_waiting=options.max_waiting)
    try:
        model, tokenizer, chat = open_run(options.run)
        settings: dict[str, Any] = dict(sampling=("temperature", "top_p"), logprobs=options.logprobs)
        batcher = Batcher(model, tokenizer=tokenizer, **settings, **sizes)
        progress("compiling")
        list(batcher.submit([0], max_new_tokens=2))  # what the first request would wait for
    except (TypeError, ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    name = options.name or pathlib.Path(options.run).resolve().name
    limits = dict(max_length=options.max_length, logprobs=options.logprobs)
    api = Api(batcher, tokenizer, chat, name=name, **limits)
    progress(f"model {name!r}: {options.slots} slots of {options.max_length} tokens")
    Server(api, host=options.host, port=options.port).run()
    return 0


def _parser() -> Parser:
    parser = Parser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n\n")[1])
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run of nsa_jax.adopt, or a model that load takes")
    add("--name", help="of the model, for clients; default: the last part of RUN")
    add("--host", default="127.0.0.1", help="address to listen at; default: %(default)s")
    add("--port", type=int, default=8000, help="port to listen at; default: %(default)s")
    add("--slots", type=int, default=8, help="requests that are written at once; default: %(default)s")
    told = "tokens of a prompt and its answer together; default: %(default)s"
    add("--max-length", type=int, default=4096, metavar="T", help=told)
    told = "requests that may wait for a slot, the others get status 429; default: %(default)s"
    add("--max-waiting", type=int, default=64, metavar="N", help=told)
    told = "log-probabilities, and up to N of the likeliest tokens, for clients that ask; default: none"
    add("--logprobs", type=int, metavar="N", help=told)
    return parser


if __name__ == "__main__":
    sys.exit(main())
