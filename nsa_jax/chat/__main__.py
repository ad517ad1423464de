"""`python -m nsa_jax.chat RUN`: a chat with a model in a terminal.

RUN is the folder of a run of nsa_jax.adopt, or whatever nsa_jax.pretrained.load takes. Ctrl-C ends an answer,
pressed again the program; so does the end of the input. Without a chat template the model continues the text.
Exit code 0: the input ended; 2: bad input; 130: Ctrl-C.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator

import jax

from nsa_jax.adopt import command_line
from nsa_jax.chat.conversation import Conversation, ConversationError
from nsa_jax.chat.run import open_run

PROGRAM, INTERRUPTED = "nsa_jax.chat", 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        model, tokenizer, chat = open_run(options.run)
        conversation = Conversation(
            model, tokenizer, chat, max_length=options.max_length, system=options.system,
            temperature=options.temperature, top_p=None if options.top_p == 1 else options.top_p,
            key=options.seed,
        )  # fmt: skip
        talk(conversation)
    except (TypeError, ValueError, ImportError) as error:
        return command_line.complain(error, PROGRAM)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        told = f"the device must have memory for a conversation, got {str(error).splitlines()[0]!r}"
        return command_line.complain(f"{told}. Use a smaller --max-length.", PROGRAM)
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def talk(conversation: Conversation) -> None:
    """Asks what is typed, until the input ends."""
    with contextlib.suppress(ImportError):  # keys that edit a line
        import readline  # noqa: F401
    while True:
        try:
            question = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if not question.strip():
            continue
        with _stopped_by_ctrl_c(conversation):
            try:
                for text in conversation.ask(question):
                    print(text, end="", flush=True)
                print()
            except ConversationError as error:
                print(flush=True)
                command_line.complain(error, PROGRAM)


@contextlib.contextmanager
def _stopped_by_ctrl_c(conversation: Conversation) -> Iterator[None]:
    """Ctrl-C ends the answer, and pressed again it does what it did before."""
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        conversation.stop()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n\n")[1])
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run of nsa_jax.adopt, or a model that load takes")
    told = "tokens of a whole conversation; its memory is taken at once; default: %(default)s"
    add("--max-length", type=command_line.positive, default=4096, metavar="T", help=told)
    told = "divides the logits; 0 takes the likeliest token; default: %(default)s"
    add("--temperature", type=command_line.weight, default=0.7, help=told)
    told = "draws from the likeliest tokens with this probability together; default: %(default)s"
    add("--top-p", type=command_line.up_to_1, default=1.0, metavar="P", help=told)
    add("--seed", type=command_line.count, default=0, help="of what is drawn; default: %(default)s")
    add("--system", metavar="TEXT", help="system message; default: that of the chat template")
    return parser


if __name__ == "__main__":
    sys.exit(main())
