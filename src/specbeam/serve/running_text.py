"""The text of tokens that become more and more, without reading all of them anew each time."""

from collections.abc import Callable, Sequence

from specbeam.grammar.spelling import UNKNOWN

CONTEXT = 16  # tokens that are read again before new ones: spaces and joined characters depend on what stands before


class RunningText:
    """The text of a list of tokens that only grows.

    Args:
        decode: returns the text of tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._length = 0  # tokens whose text is known
        self._text = ""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, the first of which are those of the call before.

        New tokens are read together with the last few known ones. Where these read otherwise in front of the new ones than
        without them (a space that vanishes, a character that was not whole), all tokens are read.

        Args:
            tokens: token ids.
        """
        start = max(self._length - CONTEXT, 0)
        known = self._decode([*tokens[start : self._length]])
        longer = self._decode([*tokens[start:]])
        if (known or not start) and longer.startswith(known) and not known.endswith(UNKNOWN):
            text = self._text + longer[len(known) :]
        else:
            text = self._decode([*tokens])
        self._length = len(tokens)
        self._text = text
        return text
