"""What a pickle may name: arrays, scalars and containers, each by a function of ours that trusts nothing.

numpy's own functions believe what they are given: a dtype its flags, an array any shape.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DTYPE = re.compile("b1|[iu][1248]|f[248]|c8|c16|[SU][1-9][0-9]{0,5}")


class Known(NamedTuple):
    """A function that a pickle may name: what stands for it here."""

    make: Callable[..., Any]


class Dtype:
    """A dtype under construction: booleans, numbers and text of a fixed size."""

    def __init__(self, code: str, *_: Any) -> None:
        if not DTYPE.fullmatch(code):
            raise ValueError(f"it holds an array of type {code[:20]!r}")
        self._code, self._order = code, "="

    def build(self, state: Any) -> None:
        if state[1] not in ("<", ">", "|", "=") or state[2:5] != (None, None, None):
            raise ValueError("it holds a structured array")
        self._order = state[1]

    def array(self, data: Any, shape: tuple[Any, ...], order: str) -> NDArray[Any]:
        dtype = np.dtype(self._order + self._code)
        content = data.encode("latin-1") if isinstance(data, str) else data
        if not isinstance(content, bytes | bytearray) or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("it holds a damaged array")
        if math.prod(shape) * dtype.itemsize != len(content):
            raise ValueError(f"it holds an array of shape {str(shape)[:80]} in {len(content):,} bytes")
        if dtype.kind == "U" and np.frombuffer(content, dtype.byteorder + "u4").max(initial=0) > 0x10FFFF:
            raise ValueError("it holds an array of damaged text")
        return np.ndarray(shape, dtype, content, order="F" if order == "F" else "C")


class Array:
    """An array whose content is still to come, and the places in the memo that wait for it."""

    def __init__(self, *_: Any) -> None:
        self.places: list[int] = []

    def build(self, state: Any) -> NDArray[Any]:
        _, shape, dtype, fortran, data = state
        return _from_buffer(data, dtype, shape, "F" if fortran else "C")


def checked_key(key: Any, nested: bool = True) -> Any:
    """A key of a dictionary or an element of a set: hashing it neither recurses deeply nor collides by design."""
    if type(key) is tuple and nested and len(key) <= 8:
        for part in key:
            checked_key(part, nested=False)
        return key
    if not isinstance(key, str | bytes | int | float | np.generic | None):
        raise ValueError(f"it has a {type(key).__name__} as a key")
    if isinstance(key, int) and abs(key) >> 60:
        raise ValueError("it has a huge number as a key")
    return key


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(dtype, Dtype) or not isinstance(shape, tuple) or len(shape) > 32:
        raise ValueError("it holds a damaged array")
    return dtype.array(data, shape, order)


def _scalar(dtype: Any, data: Any) -> Any:
    return _from_buffer(data, dtype, (), "C")[()]


def _bytes(content: Any = b"", encoding: Any = "latin1") -> bytes:
    if isinstance(content, bytes):
        return content
    if not isinstance(content, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("it holds damaged bytes")
    return content.encode("latin-1")


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((checked_key(key), value) for key, value in pairs)


def _defaulting(factory: Any) -> defaultdict[Any, Any]:
    if not isinstance(factory, Known) or factory.make is not _empty_list:
        raise ValueError("it holds a defaultdict that makes no lists")
    return defaultdict(list)


def _empty_list() -> list[Any]:
    return []


def _set(items: Any = ()) -> set[Any]:
    return {checked_key(item) for item in items}


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _bytearray(*content: Any) -> bytearray:
    return bytearray(_bytes(*content))


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


BUILTINS: dict[str, Callable[..., Any]] = {
    **{"list": _empty_list, "set": _set, "frozenset": _frozenset, "bytes": _bytes, "bytearray": _bytearray},
    "complex": _complex,
}
ARRAYS: dict[str, Callable[..., Any]] = {
    "multiarray._reconstruct": Array,
    "multiarray.scalar": _scalar,
    "numeric._frombuffer": _from_buffer,
}
KNOWN: dict[str, Callable[..., Any]] = {
    **{f"{module}.{name}": make for module in ("builtins", "__builtin__") for name, make in BUILTINS.items()},
    **{f"{module}.{name}": make for module in ("numpy.core", "numpy._core") for name, make in ARRAYS.items()},
    **{"numpy.dtype": Dtype, "numpy.ndarray": Array, "_codecs.encode": _bytes},
    **{"collections.OrderedDict": _ordered, "collections.defaultdict": _defaulting},
}
