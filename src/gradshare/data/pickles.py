"""Pickles from strangers: arrays, text, numbers and containers, and nothing else.

A pickle is a program, and the standard unpickler runs it: even one that is kept from naming functions believes the
lengths and the places in its memo that a file claims. This is a small machine for the same programs that knows no
functions but those of pickled_objects, and makes room for no more than the file holds.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from gradshare.data.pickled_objects import KNOWN, Array, Dtype, Known, checked_key
from gradshare.errors import UserError

MAX_OPERATIONS = 5_000_000
"""The longest program; the caches of MiniImagenet have about 100,000 operations."""
MAX_DEPTH = 100
"""The deepest nesting of containers."""
LEAVES = (str, bytes, bytearray, int, float, complex, type(None), np.ndarray, np.generic)
SURROGATE = re.compile("[\ud800-\udfff]")


def load_pickle(stream: IO[bytes], name: str) -> Any:
    """Read a pickle of any protocol, of Python 2 too (its byte strings become text, as with encoding="latin1").

    stream: can seek, as Source.open_stream gives it.
    name: what to call it in an error.

    >>> import io, pickle
    >>> cache = pickle.dumps({"labels": ["cat"], "images": np.zeros((2, 3))})
    >>> load_pickle(io.BytesIO(cache), "cache.pkl")["images"].shape
    (2, 3)
    """
    try:
        result = _Machine(_Input(stream)).run()
        _check(result)
    except Exception as error:  # hostile bytes meet the machine here; whatever goes wrong is the file's fault
        reason = str(error) or type(error).__name__
        raise UserError(f"'{name}' is not a pickle of arrays, text and numbers: {reason}") from None
    return result


def _check(result: Any) -> None:
    """Refuse what only means something inside a pickle, and nesting deeper than MAX_DEPTH."""
    seen: set[int] = set()
    level = [result]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict | list | tuple | set | frozenset) and not isinstance(item, Known):
                if id(item) not in seen:
                    below.extend(item.values() if isinstance(item, dict) else item)
                seen.add(id(item))
            elif not isinstance(item, LEAVES):
                raise ValueError(f"it holds an unfinished {type(item).__name__}")
        if not below:
            return
        level = below
    raise ValueError(f"it is nested over {MAX_DEPTH} deep")


class _Input:
    """A stream that is never asked for more than it has."""

    def __init__(self, stream: IO[bytes]) -> None:
        start = stream.tell()
        self.left = stream.seek(0, 2) - start
        stream.seek(start)
        self._stream = stream

    def read(self, count: int) -> bytes:
        if count > self.left:
            raise EOFError(f"it claims {count:,} bytes more, and has {self.left:,}")
        self.left -= count
        return self._stream.read(count)

    def line(self) -> bytes:
        line = self._stream.readline()
        self.left -= len(line)
        if not line.endswith(b"\n"):
            raise EOFError("it ends too early")
        return line[:-1]

    def number(self, size: int) -> int:
        return int.from_bytes(self.read(size), "little")

    def counted(self, size: int) -> bytes:
        return self.read(self.number(size))


class _Machine:
    """A stack, marks in it, and a memo, as the module pickletools describes them."""

    def __init__(self, given: _Input) -> None:
        self.given = given
        self.allowance = 2 * given.left + MAX_OPERATIONS  # of work in functions, so that a short file makes little
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MAX_OPERATIONS):
            code = self.given.read(1)
            if code in VALUES:
                self.stack.append(VALUES[code](self.given))
            elif code in TAKERS:
                self.stack.append(TAKERS[code](self))
            elif code in ACTIONS:
                ACTIONS[code](self)
            elif code == b".":
                return self.stack.pop()
            else:
                raise ValueError(f"operation {code!r} is not admitted")
        raise ValueError(f"it has over {MAX_OPERATIONS:,} operations")

    def marked(self) -> list[Any]:
        """Take everything above the last mark."""
        return self.last(len(self.stack) - self.marks.pop())

    def last(self, count: int) -> list[Any]:
        start = len(self.stack) - count
        if not 0 <= start <= len(self.stack):
            raise ValueError("it takes more than it has put")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("it appends to something that is no list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise ValueError("it fills something that is no dictionary")
        self.stack[-1].update(_dict(items))

    def add(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not set:
            raise ValueError("it adds to something that is no set")
        self.stack[-1].update(map(checked_key, items))

    def put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]
        if isinstance(self.stack[-1], Array):
            self.stack[-1].places.append(place)

    def spend(self, arguments: tuple[Any, ...]) -> None:
        self.allowance -= sum(len(argument) for argument in arguments if hasattr(argument, "__len__"))
        if self.allowance < 0:
            raise ValueError("it copies the same content many times")

    def call(self) -> Any:
        known, arguments = self.last(2)
        if not isinstance(known, Known) or type(arguments) is not tuple:
            raise ValueError("it calls something that is no function")
        self.spend(arguments)
        return known.make(*arguments)

    def build(self) -> None:
        target, state = self.last(2)
        if not isinstance(target, Array | Dtype):
            raise ValueError(f"it gives a state to a {type(target).__name__}")
        self.spend(state)
        built = target.build(state)
        if isinstance(target, Array):
            self.memo.update(dict.fromkeys(target.places, built))
            target.places.clear()
        self.stack.append(target if built is None else built)


def _dict(items: list[Any]) -> dict[Any, Any]:
    return {checked_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _known(module: Any, name: Any) -> Known:
    wanted = f"{module}.{name}"
    if wanted not in KNOWN:
        raise ValueError(f"it asks for {wanted[:80]!r}")
    return Known(KNOWN[wanted])


def _integer(line: bytes) -> int:
    return line == b"01" if line in (b"00", b"01") else int(line.removesuffix(b"L"))


def _quoted(line: bytes) -> str:
    return codecs.escape_decode(line.strip()[1:-1])[0].decode("latin-1")


def _text(content: bytes, encoding: str = "utf-8") -> str:
    text = content.decode(encoding)
    if SURROGATE.search(text):
        raise ValueError("it holds damaged text")
    return text


VALUES: dict[bytes, Callable[[_Input], Any]] = {
    **{b"N": lambda _: None, b"\x88": lambda _: True, b"\x89": lambda _: False},
    **{b")": lambda _: (), b"]": lambda _: [], b"}": lambda _: {}, b"\x8f": lambda _: set()},
    **{b"K": lambda given: given.number(1), b"M": lambda given: given.number(2)},
    **{
        b"J": lambda given: struct.unpack("<i", given.read(4))[0],
        b"G": lambda given: struct.unpack(">d", given.read(8))[0],
    },
    **{b"I": lambda given: _integer(given.line()), b"L": lambda given: _integer(given.line())},
    **{b"F": lambda given: float(given.line()), b"S": lambda given: _quoted(given.line())},
    **{b"U": lambda given: given.counted(1).decode("latin-1"), b"T": lambda given: given.counted(4).decode("latin-1")},
    **{b"\x8c": lambda given: _text(given.counted(1)), b"X": lambda given: _text(given.counted(4))},
    **{b"\x8d": lambda given: _text(given.counted(8)), b"V": lambda given: _text(given.line(), "raw-unicode-escape")},
    **{
        b"C": lambda given: given.counted(1),
        b"B": lambda given: given.counted(4),
        b"\x8e": lambda given: given.counted(8),
    },
    b"\x96": lambda given: bytearray(given.counted(8)),
    b"\x8a": lambda given: int.from_bytes(given.counted(1), "little", signed=True),
    b"c": lambda given: _known(_text(given.line()), _text(given.line())),
}
"""Operations that put a value."""
TAKERS: dict[bytes, Callable[[_Machine], Any]] = {
    **{b"\x85": lambda machine: tuple(machine.last(1)), b"\x86": lambda machine: tuple(machine.last(2))},
    **{b"\x87": lambda machine: tuple(machine.last(3)), b"t": lambda machine: tuple(machine.marked())},
    **{b"l": lambda machine: machine.marked(), b"d": lambda machine: _dict(machine.marked())},
    b"\x91": lambda machine: frozenset(map(checked_key, machine.marked())),
    **{
        b"h": lambda machine: machine.memo[machine.given.number(1)],
        b"j": lambda machine: machine.memo[machine.given.number(4)],
    },
    b"g": lambda machine: machine.memo[int(machine.given.line())],
    **{b"2": lambda machine: machine.stack[-1], b"\x93": lambda machine: _known(*machine.last(2)), b"R": _Machine.call},
}
"""Operations that put a value which they make from what is there."""
ACTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    **{b"\x80": lambda machine: machine.given.read(1), b"\x95": lambda machine: machine.given.read(8)},
    **{b"(": lambda machine: machine.marks.append(len(machine.stack)), b"1": _Machine.marked, b"0": _Machine.pop},
    **{b"a": lambda machine: machine.extend(machine.last(1)), b"e": lambda machine: machine.extend(machine.marked())},
    **{b"s": lambda machine: machine.update(machine.last(2)), b"u": lambda machine: machine.update(machine.marked())},
    **{b"\x90": lambda machine: machine.add(machine.marked()), b"b": _Machine.build},
    **{
        b"q": lambda machine: machine.put(machine.given.number(1)),
        b"r": lambda machine: machine.put(machine.given.number(4)),
    },
    **{
        b"p": lambda machine: machine.put(int(machine.given.line())),
        b"\x94": lambda machine: machine.put(len(machine.memo)),
    },
}
"""Operations that do something else."""
