"""What a user can get wrong, as opposed to what is wrong in the program."""


class InputError(Exception):
    """Bad input, with the message `<rule>, got <values>. <what to do>.`; the command exits with code 2."""
