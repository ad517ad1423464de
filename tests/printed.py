"""What a command printed: its text, and the JSON object of its last line."""

import json


def last_line(capsys) -> tuple[str, dict]:
    printed = capsys.readouterr().out
    return printed, json.loads(printed.splitlines()[-1])
