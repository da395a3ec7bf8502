"""Pickles: data are read as the standard unpickler reads them, and programs are refused."""

from __future__ import annotations

import builtins
import collections
import io
import os
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradshare.data import pickles
from gradshare.data.pickles import load_pickle
from gradshare.errors import UserError

SHARED = ["twice"]
DATA: list[Any] = [
    {
        "image_data": np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3),
        "class_dict": {"n01": [0, 1], "é": []},
    },
    [None, True, False, 0, -1, 255, 256, 65536, -(2**31), 2**40, -(2**70), 0.5, -1e300, 1j, "text", "ü", b"", b"bytes"],
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {1, 2}, frozenset({3}), bytearray(b"x"), set(), {}, []],
    [SHARED, SHARED, {"a": SHARED}],
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"a": [1]}),
    [np.float32(0.5), np.int64(-3), np.bool_(True), np.str_("é"), np.bytes_(b"x")],
    {np.int64(3): "a", ("t", 1): "b", b"k": 1},
    [np.arange(6).astype(dtype).reshape(2, 3) for dtype in ("<i2", ">i4", "u8", "<f2", ">f8", "c16", "?")],
    [np.array(["a", "bcd"]), np.array([b"a", b"bcd"]), np.array(5), np.zeros((0, 3)), np.asfortranarray(np.eye(3)[:2])],
    list(range(5000)),
    "x" * 100_000,
]


def load(content: bytes) -> Any:
    return load_pickle(io.BytesIO(content), "train.pkl")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            one.dtype.newbyteorder("=") == other.dtype.newbyteorder("=")
            and one.shape == other.shape
            and bool((one == other).all())
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(type(one) is type(other) and one == other)


def refused(content: bytes, *parts: str) -> None:
    started = time.perf_counter()
    with pytest.raises(UserError) as caught:
        load(content)
    assert time.perf_counter() - started < 5
    assert "'train.pkl' is not a pickle of arrays, text and numbers" in str(caught.value)
    for part in parts:
        assert part in str(caught.value), caught.value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("case", range(len(DATA)))
def test_data_are_read_as_the_standard_unpickler_reads_them(case: int, protocol: int) -> None:
    content = pickle.dumps(DATA[case], protocol)
    assert same(load(content), pickle.loads(content))


@pytest.mark.parametrize("protocol", range(6))
def test_both_names_of_numpys_core(protocol: int) -> None:
    content = pickle.dumps(np.arange(5), protocol)
    old, new = (b"numpy.core.", b"numpy._core.")
    for before, after in ((old, new), (new, old)):
        if protocol < 4:  # later protocols count the letters of a name
            assert load(content.replace(before, after)).tolist() == [0, 1, 2, 3, 4]
        else:
            shorter = (
                struct.pack("B", len(after) + len("multiarray")),
                struct.pack("B", len(before) + len("multiarray")),
            )
            named = content.replace(shorter[1] + before + b"multiarray", shorter[0] + after + b"multiarray")
            assert load(named).tolist() == [0, 1, 2, 3, 4]


def test_pickles_of_python_2() -> None:
    text = b"(dp0\nS'image_data'\np1\ncnumpy.core.multiarray\n_reconstruct\np2\n(cnumpy\nndarray\np3\n(I0\ntp4\n"
    text += b"S'b'\np5\ntp6\nRp7\n(I1\n(I3\ntp8\ncnumpy\ndtype\np9\n(S'u1'\np10\nI0\nI1\ntp11\nRp12\n"
    text += b"(I3\nS'|'\np13\nNNNI-1\nI-1\nI0\ntp14\nbI00\nS'\\x01\\xff\\''\np15\ntp16\nbsV\xe9t\\u00e9\np17\nL5L\ns."
    result = load(text)
    assert result["image_data"].tolist() == [1, 255, 39] and result["été"] == 5
    assert same(result, pickle.loads(text, encoding="latin1"))
    binary = b"\x80\x02}q\x00(U\x03dogq\x01]q\x02(K\x01K\x02eT\x02\x00\x00\x00\xe9\xe8q\x03Nu."
    assert load(binary) == {"dog": [1, 2], "éè": None}


class Runs:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


HOSTILE = {
    "posix.system": Runs(os.system, "touch evil"),
    "eval": Runs(eval, "open('evil', 'w')"),
    "exec": Runs(exec, "open('evil', 'w')"),
    "getattr": Runs(getattr, "x", "upper"),
    "open": Runs(open, "evil", "w"),
    "__import__": Runs(builtins.__import__, "os"),
    "Path": Path("evil"),
    "pickle.loads": Runs(pickle.loads, b"x"),
    "load": Runs(np.load, "evil.npy"),
    "Counter": collections.Counter("aab"),
    "memmap": Runs(np.memmap, "evil", "u1", "w+", 0, (9,)),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", HOSTILE)
def test_programs_are_refused_and_do_nothing(
    name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(pickle.dumps({"a": [HOSTILE[name]]}, protocol), "it asks for '")
    assert not list(tmp_path.iterdir())


def test_other_ways_to_name_and_call() -> None:
    refused(b"\x80\x02cos\nsystem\n.", "it asks for 'os.system'")
    refused(b"(S'echo'\nios\nsystem\n.", "not admitted")
    refused(b"(cos\nsystem\nS'echo'\no.", "it asks for")
    refused(b"\x80\x02\x82\x01.", "not admitted")  # the extension registry
    refused(b"Pid\n.", "not admitted")  # a persistent id
    refused(b"\x80\x05\x97.", "not admitted")  # a buffer from outside
    refused(b"\x80\x02cnumpy\nndarray\n)\x81.", "not admitted")  # NEWOBJ
    refused(b"\x80\x04\x8c\x08builtins\x8c\x0cset.__init__\x93.", "it asks for")  # attributes of what is known
    refused(b"\x80\x02cnumpy\ndtype\n.", "unfinished")
    refused(b"\x80\x02ccollections\nOrderedDict\n)R}S'a'\nI1\nsb.", "gives a state")
    refused(b"\x80\x02]K\x05\x85R.", "no function")


def test_object_and_structured_arrays_are_refused() -> None:
    for protocol in range(6):
        refused(pickle.dumps(np.array([1, "a", None], dtype=object), protocol), "array of type 'O8'")
        refused(pickle.dumps(np.zeros(2, [("a", "i4"), ("b", "f8")]), protocol), "array of type 'V12'")
        refused(pickle.dumps(np.zeros(2, "M8[s]"), protocol), "array of type 'M8'")
    refused(pickle.dumps(np.zeros(4, "i4"), 2).replace(b"NNNJ", b"N)}J"), "structured")  # an i4 that claims fields


def test_flags_of_a_dtype_are_ignored() -> None:
    """A dtype of numbers that says that it holds objects makes numpy itself follow wild pointers."""
    content = pickle.dumps(np.arange(3, dtype="<i8"), 2)
    start = content.index(b"NNNJ") + 13
    assert content[start : start + 2] == b"K\0"
    assert load(content[:start] + b"K\x3f" + content[start + 2 :]).tolist() == [0, 1, 2]


ARRAY = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\x01btR"
ARRAY += b"(K\x01%scnumpy\ndtype\n(X%b\0\0\0%sK\0K\x01tR"
STATE = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89%stb."


def forged(shape: bytes, dtype: bytes = b"u1", data: bytes = b"data") -> bytes:
    """A pickled array that says what it likes of itself."""
    return ARRAY % (shape, bytes([len(dtype)]), dtype) + STATE % (b"U" + bytes([len(data)]) + data)


CLAIMS = {
    "shape": forged(b"(\x8a\x08" + struct.pack("<q", 10**15) + b"t"),
    "overflow": forged(b"(" + (b"\x8a\x08" + struct.pack("<q", 2**62)) * 4 + b"t"),
    "wraps around": forged(b"(" + b"\x8a\x08" + struct.pack("<q", 2**62) + b"K\x10K\x10t"),
    "negative": forged(b"(J\xff\xff\xff\xffJ\xfc\xff\xff\xfft"),
    "many dimensions": forged(b"(" + (b"\x8a\xff" + b"\x7f" * 255) * 50_000 + b"t"),
    "empty but vast": forged(b"(K\0" + (b"\x8a\x08" + struct.pack("<q", 2**62)) * 3 + b"t", data=b""),
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 10**15) + b"abc.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 10**15) + b"abc.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 10**15) + b"abc.",
    "bytes of 3 GB": b"\x80\x03B" + struct.pack("<I", 3 * 10**9) + b"abc.",
    "memo": b"\x80\x02]r\xff\xff\xff\xff" * 2 + b"p99999999999999999999\n",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 10**15),
    "digits": b"L" + b"9" * 500_000 + b"L\n.",
    "bytearray by number": b"\x80\x02c__builtin__\nbytearray\n\x8a\x06" + struct.pack("<q", 10**13)[:6] + b"\x85R.",
    "bytes by number": b"\x80\x02c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.",
    "long text in an array": forged(b"(K\x01t", b"U999999999"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_huge_claims_take_no_memory(name: str) -> None:
    tracemalloc.start()
    try:
        refused(CLAIMS[name])
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_the_claims_are_near_misses() -> None:
    assert load(forged(b"(K\x04t")).tolist() == list(b"data")
    refused(forged(b"(K\x03t"), "an array of shape (3,) in 4 bytes")
    refused(CLAIMS["bytes"], "it claims 1,000,000,000,000,000 bytes more, and has 4")


def test_depth_is_bounded() -> None:
    refused(b"]" * 100_000 + b"a" * 99_999 + b".", "nested over 100 deep")
    refused(b"\x80\x02)" + b"\x85" * 1_000_000 + b".", "nested over 100 deep")
    refused(b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.", "tuple as a key")  # hashing it would overflow the stack
    refused(b"\x80\x04\x8f()" + b"\x85" * 100_000 + b"\x90.", "tuple as a key")
    assert load(b"]" * 90 + b"a" * 89 + b".")


def test_cycles_and_shared_content_end() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    result = load(pickle.dumps(cycle))
    assert result[0] is result
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs] * 10
    assert len(load(pickle.dumps(laughs))) == 10


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = b"\x80\x02X" + struct.pack("<I", 200_000) + b"a" * 200_000 + b"q\0"
    refused(letters + b"c_codecs\nencode\nq\1" + b"h\1h\0\x85R0" * 100_000 + b".", "many times")
    monkeypatch.setattr(pickles, "MAX_OPERATIONS", 1000)
    refused(b"]0" * 1000 + b"N.", "over 1,000 operations")


def test_keys_are_simple() -> None:
    refused(pickle.dumps({2**80: 1}), "huge number as a key")
    refused(pickle.dumps({frozenset(): 1}), "frozenset as a key")
    refused(b"}]K\1s.", "list as a key")


@pytest.mark.parametrize("protocol", range(6))
def test_truncated_pickles(protocol: int) -> None:
    content = pickle.dumps(DATA[0], protocol)
    for cut in range(len(content)):
        refused(content[:cut])


def test_things_that_are_no_pickles() -> None:
    for content in (
        b"",
        b".",
        b"hello",
        b"PK\3\4" * 10,
        b"\0" * 99,
        b"0.",
        b"a.",
        b"t.",
        b"s.",
        b"R.",
        b"b.",
        b"(u.",
        b"h\0.",
    ):
        refused(content)
    refused(b"\x80\x04\x8c\x03\xed\xa0\x80.")  # half of a character
    refused(b"V\\ud800\n.", "damaged text")
    refused(forged(b"(K\x01t", b"U1", b"\xff\xff\xff\xff"), "damaged text")
