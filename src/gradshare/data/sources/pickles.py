"""Pickles that we did not write: arrays, lists, dictionaries, text and numbers, and nothing else.

A pickle is a program. `pickletools` first reads it without running it, and we check every instruction and length. Then
Python's own unpickler runs it. The only functions that it can call are stand-ins of ours: numpy's own functions trust
what a file says about an array.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradshare.files import reading

LARGE = 1 << 20  # bytes of a string that stays in the file
MAX_HASHES = 1000  # of a tuple and all that is in it; Python does this by recursion, so a very deep one would end it
MAX_ENTRIES = 20_000  # keys and values of all dictionaries
ALLOWED = re.compile(
    "PROTO|FRAME|STOP|MARK|POP|POP_MARK|DUP|NONE|NEWTRUE|NEWFALSE|INT|BININT[12]?|LONG1?|(BIN)?FLOAT"
    "|STRING|(SHORT_)?BINSTRING|(SHORT_)?BINBYTES|BINBYTES8|BYTEARRAY8|UNICODE|(SHORT_)?BINUNICODE|BINUNICODE8"
    "|(EMPTY_)?(LIST|TUPLE|DICT)|TUPLE[123]|APPENDS?|SETITEMS?|(LONG_)?(BIN)?(GET|PUT)|MEMOIZE"
    "|GLOBAL|STACK_GLOBAL|REDUCE|BUILD"
)


class Pickled(NamedTuple):
    """What `load_pickle` read."""

    content: Any
    left_out: list[tuple[int, int]]  # start in the file, and length, of byte strings that were not read


def load_pickle(stream: IO[bytes], name: str, leave_out: bool = True) -> Pickled:
    """Read a pickle of any protocol, also of Python 2 (but for its text protocol). Arrays come as `PickledArray`.

    Args:
        stream: can seek.
        name: of the file, for an error.
        leave_out: do not read byte strings of a mebibyte or more; their content is then undefined.

    Example:
        >>> import io
        >>> content = pickle.dumps({"labels": ["cat"], "images": np.zeros((2, 3))})
        >>> load_pickle(io.BytesIO(content), "cache.pkl").content["images"].array().shape
        (2, 3)
    """
    with reading(f"'{name}' is not a pickle of arrays, lists, text and numbers"):
        _check_instructions(_Counted(stream))
        source = _Skimmed(stream, LARGE if leave_out else math.inf)
        return Pickled(_Unpickler(cast(IO[bytes], source), encoding="latin1").load(), source.left_out)


def _check_instructions(source: _Counted) -> None:
    """Raise an error for instructions, and for amounts of memory and work, that no pickle of data has.

    Python hashes a tuple by the hashes of its parts, each time anew: thirty tuples, each of them twice in the next,
    take a billion. So here the stack has the number of hashes that the hash of each object takes. And many keys of one
    hash are compared with each other.
    """
    entries = 0
    stack, marks, memo = list[int](), list[int](), dict[int, int]()
    for count, (instruction, argument, _) in enumerate(pickletools.genops(cast(IO[bytes], source))):
        name, before = instruction.name, instruction.stack_before
        if not ALLOWED.fullmatch(name):
            raise ValueError(f"the instruction {name} is not allowed")
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE" or name.endswith("PUT"):
            place = len(memo) if name == "MEMOIZE" else cast(int, argument)
            if place > count:  # the unpickler's memo is an array
                raise ValueError("it asks for too much memory")
            memo[place] = stack[-1]
        elif name == "DUP" or name.endswith("GET"):
            stack.append(stack[-1] if name == "DUP" else memo[cast(int, argument)])
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        else:
            marked = pickletools.markobject in before
            start = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
            hashes = 1 + sum(stack[start:]) if name.startswith("TUPLE") or name in ("REDUCE", "BUILD") else 1
            entries += len(stack) - start if name in ("DICT", "SETITEM", "SETITEMS") else 0
            if hashes > MAX_HASHES or entries > MAX_ENTRIES:
                raise ValueError("it has tuples, or dictionaries, that would take too long to hash")
            stack[start:] = [hashes] * len(instruction.stack_after)


class _Counted:
    """The file for `pickletools`, which reads every string to check its length: a long one is replaced by zeros."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._size = stream.seek(0, 2)
        stream.seek(0)
        self._stream, self.readline = stream, stream.readline

    def read(self, count: int) -> bytes:
        if count < LARGE:
            return self._stream.read(count)
        start = self._stream.tell()
        return bytes(self._stream.seek(min(start + count, self._size)) - start)


class _Skimmed:
    """The file for the unpickler, without its long byte strings, so that 800 MB of images need no memory.

    The unpickler allocates memory for such a string and asks `readinto` to fill it. Memory that nobody touches is not
    used, so `readinto` only notes where the string is.
    """

    def __init__(self, stream: IO[bytes], large: float) -> None:
        stream.seek(0)
        self._stream, self._large, self.left_out = stream, large, list[tuple[int, int]]()
        self.read, self.readline = stream.read, stream.readline

    def readinto(self, memory: Any) -> int:
        if len(memory) >= self._large:
            self.left_out.append((self._stream.tell(), len(memory)))
            self._stream.seek(len(memory), 1)
            return len(memory)
        content = self._stream.read(len(memory))
        memory[: len(content)] = content
        return len(content)


class PickledDtype:
    """What a pickle says about the type of an array."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.code = f"={name}" if type(name) is str else ""  # the order of bytes, and the name: "=u1"

    def __setstate__(self, state: Any) -> None:
        self.code = state[1] + self.code[1:]


@dataclass
class PickledArray:
    """What a pickle says about an array; nothing is checked until `array` is called."""

    data: Any = b""
    dtype: Any = None
    shape: Any = ()
    order: Any = "C"

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, fortran, self.data = state
        self.order = "F" if fortran else "C"

    def array(self) -> NDArray[Any]:
        """The array of numbers; ValueError where the parts do not fit together."""
        data = self.data.encode("latin-1") if isinstance(self.data, str) else self.data
        code = self.dtype.code if isinstance(self.dtype, PickledDtype) else ""
        if not re.fullmatch("[<>|=]([iu][1248]|f[48])", code):
            raise ValueError(f"it holds an array that is not of numbers, but of type {code[:20]!r}")
        sides = self.shape if isinstance(self.shape, tuple) and len(self.shape) <= 8 else (-1,)
        if not isinstance(data, bytes | bytearray) or not all(type(side) is int and side >= 0 for side in sides):
            raise ValueError("it holds a damaged array")
        if math.prod(sides) * int(code[-1]) != len(data):
            raise ValueError(f"it holds an array of shape {str(sides)[:80]} in {len(data):,} bytes")
        return np.frombuffer(data, code).reshape(sides, order="F" if self.order == "F" else "C")


class _Function:
    """A function that a pickle may call. A pickle cannot set its attributes."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it changes a function")


KNOWN = {
    "numpy.dtype": _Function(PickledDtype),
    "numpy.ndarray": _Function(lambda *_: PickledArray()),
    "numpy.core.multiarray._reconstruct": _Function(lambda *_: PickledArray()),
    "numpy.core.numeric._frombuffer": _Function(PickledArray),
    "_codecs.encode": _Function(lambda text, *_: text),  # bytes in protocols 0 to 2; PickledArray encodes the text
    "collections.OrderedDict": _Function(lambda: {}),
    "collections.defaultdict": _Function(lambda *_: {}),
    **dict.fromkeys(("builtins.list", "__builtin__.list"), _Function(lambda: [])),
    "__builtin__.bytes": _Function(lambda: b""),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Function:
        wanted = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if wanted not in KNOWN:
            raise ValueError(f"it asks for {wanted[:80]!r}")
        return KNOWN[wanted]
