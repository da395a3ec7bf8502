"""Pickles: data are read, programs are never run, and no claim of a file takes memory or time."""

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

from gradshare.data.sources.pickles import PickledArray, load_pickle
from gradshare.errors import UserError

SHARED = ["twice"]
DATA: list[Any] = [
    {"image_data": np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3), "class_dict": {"n01": [0, 1], "é": []}},
    [None, True, False, 0, -1, 255, 256, 65536, -(2**31), 2**40, -(2**70), 0.5, -1e300, "text", "ü", b""],
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}, []],
    [SHARED, SHARED, {"a": SHARED}],
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"a": [1]}),
    [np.arange(6).astype(dtype).reshape(2, 3) for dtype in ("<i2", ">i4", "u8", ">f8")],
    [np.array(5), np.zeros((0, 3)), np.asfortranarray(np.eye(3)[:2])],
    list(range(5000)),
    "x" * 100_000,
]


def load(content: bytes) -> Any:
    return load_pickle(io.BytesIO(content), "train.pkl").content


def same(one: Any, other: Any) -> bool:
    if isinstance(one, PickledArray):
        return bool(np.array_equal(one.array(), other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other or (one, other) == ("", b""))  # protocols 0 to 2 have no bytes


def refused(content: bytes, *parts: str) -> None:
    started = time.process_time()
    with pytest.raises(UserError) as caught:
        load(content)
    assert time.process_time() - started < 5
    for part in ("'train.pkl'", *parts):
        assert part in str(caught.value), caught.value


@pytest.mark.parametrize("protocol", range(6))
def test_data_are_read(protocol: int) -> None:
    for data in DATA:
        assert same(load(pickle.dumps(data, protocol)), data)


def test_both_names_of_numpys_core() -> None:
    content = pickle.dumps(np.arange(5), 2)
    for before, after in ((b"numpy.core.", b"numpy._core."), (b"numpy._core.", b"numpy.core.")):
        assert load(content.replace(before, after)).array().tolist() == [0, 1, 2, 3, 4]


def test_pickles_of_python_2() -> None:
    assert load(forged(b"(K\x03t", data=b"\x01\xff'")).array().tolist() == [1, 255, 39]
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
    "getattr": Runs(getattr, "x", "upper"),
    "open": Runs(open, "evil", "w"),
    "__import__": Runs(builtins.__import__, "os"),
    "Path": Path("evil"),
    "pickle.loads": Runs(pickle.loads, b"x"),
    "load": Runs(np.load, "evil.npy"),
    "memmap": Runs(np.memmap, "evil", "u1", "w+", 0, (9,)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_programs_are_not_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(6):
        refused(pickle.dumps({"a": [HOSTILE[name]]}, protocol))
    assert not list(tmp_path.iterdir())


def test_other_ways_to_name_and_call() -> None:
    refused(b"\x80\x02cos\nsystem\n.", "it asks for 'os.system'")
    refused(b"\x80\x04\x8c\x08builtins\x8c\x0dlist.__init__\x93.", "it asks for")  # attributes of what is known
    not_allowed = [
        b"(S'echo'\nios\nsystem\n.",
        b"(cos\nsystem\nS'echo'\no.",
        b"\x80\x02\x82\x01.",  # the extension registry
        b"Pid\n.",  # a persistent id
        b"\x80\x05\x97.",  # a buffer from outside
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # NEWOBJ
    ]
    for content in not_allowed:
        refused(content, "not allowed")
    refused(b"\x80\x02cnumpy\ndtype\n}S'call'\nI1\nsb.", "changes a function")  # BUILD sets attributes
    refused(b"\x80\x02cnumpy\ndtype\nN}S'call'\nI1\ns\x86b.", "changes a function")
    refused(b"\x80\x02]K\x05\x85R.", "not callable")


def test_only_numbers_become_arrays() -> None:
    """A dtype that says that it holds objects would make numpy follow wild pointers."""
    content = pickle.dumps(np.arange(3, dtype="<i8"), 2)
    start = content.index(b"NNNJ") + 13
    assert content[start : start + 2] == b"K\0"
    assert load(content[:start] + b"K\x3f" + content[start + 2 :]).array().tolist() == [0, 1, 2]  # flags are ignored
    for bad in (np.array([1, "a", None], dtype=object), np.zeros(2, [("a", "i4")]), np.zeros(2, "M8[s]")):
        for protocol in (2, 4):
            with pytest.raises(ValueError, match="not of numbers"):
                load(pickle.dumps(bad, protocol)).array()


ARRAY = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\x01btR"
ARRAY += b"(K\x01%scnumpy\ndtype\n(X%b\0\0\0%sK\0K\x01tR"
STATE = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89%stb."


def forged(shape: bytes, dtype: bytes = b"u1", data: bytes = b"data") -> bytes:
    """A pickled array that claims anything about itself."""
    return ARRAY % (shape, bytes([len(dtype)]), dtype) + STATE % (b"U" + bytes([len(data)]) + data)


CLAIMS = {
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 10**15) + b"abc.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 10**15) + b"abc.",
    "bytearray of 10 GB": b"\x80\x05\x96" + struct.pack("<Q", 10**10) + b"abc.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 10**15) + b"abc.",
    "bytes of 3 GB": b"\x80\x03B" + struct.pack("<I", 3 * 10**9) + b"abc.",
    "memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "memo in digits": b"\x80\x02]p99999999999999\n.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 10**15) + b"].",
    "digits": b"L" + b"9" * 500_000 + b"L\n.",
    "deep tuple as a key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",  # hashing it would overflow the stack
    "tuple of shared tuples as a key": b"\x80\x02})" + b"2\x86" * 40 + b"K\x01s.",  # 2**40 hashes
    "the same by the memo": b"\x80\x02})q\0" + b"0(h\0h\0tq\0" * 40 + b"K\x01s.",
    "the same through a function": b"\x80\x02})" + b"q\x000c_codecs\nencode\nh\0h\0\x86\x85R" * 40 + b"K\x01s.",
    "keys of one hash": b"\x80\x02}("
    + b"".join(b"\x8a\x0c" + (n * (2**61 - 1)).to_bytes(12, "little") + b"N" for n in range(1, 30_000))
    + b"u.",
    "copies of a list": b"\x80\x02]q\0(" + b"K\1" * 99 + b"eccollections\nOrderedDict\nh\0\x85R.",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_take_no_memory_and_no_time(name: str) -> None:
    tracemalloc.start()
    try:
        refused(CLAIMS[name])
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "shape",
    [
        b"(K\x03t",
        b"(\x8a\x08" + struct.pack("<q", 10**15) + b"t",
        b"(" + (b"\x8a\x08" + struct.pack("<q", 2**62)) * 4 + b"t",
        b"(\x8a\x08" + struct.pack("<q", 2**62) + b"K\x10K\x10t",  # wraps around
        b"(J\xff\xff\xff\xffJ\xfc\xff\xff\xfft",
        b"(K\0" + b"K\1" * 50 + b"t",
    ],
)
def test_shapes_that_do_not_fit(shape: bytes) -> None:
    assert load(forged(b"(K\x04t")).array().tolist() == list(b"data")
    with pytest.raises(ValueError, match="array"):
        load(forged(shape)).array()


def test_content_in_the_place_of_a_type_is_never_printed() -> None:
    """Printing nested lists that share their parts would take for ever."""
    shared = b"]q\0" + b"(h\0h\0lq\0" * 60
    dtype = load(b"\x80\x02cnumpy\ndtype\n(" + shared + b"tR.")
    with pytest.raises(ValueError, match="not of numbers"):
        PickledArray(b"data", dtype, (4,)).array()
    refused(b"\x80\x02cnumpy\ndtype\n(U\2u1tR(K\3" + shared + b"tb.")


def test_cycles_and_shared_content_are_read_once() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    result = load(pickle.dumps(cycle))
    assert result[0] is result
    nested: list[Any] = ["a"]
    for _ in range(60):
        nested = [nested] * 10
    assert len(load(pickle.dumps(nested))) == 10
    assert load(b"]" * 100_000 + b"a" * 99_999 + b".")  # deep lists are only read, never compared or printed


def test_text_is_encoded_once_and_not_for_each_use() -> None:
    """`_codecs.encode` in protocols 0 to 2: a short file could ask for many copies of a long text."""
    letters = b"\x80\x02]q\2X" + struct.pack("<I", 200_000) + b"a" * 200_000 + b"q\0c_codecs\nencode\nq\1"
    copies = b"00" + b"h\2h\1h\0\x85Ra0" * 9_000 + b"h\2."
    tracemalloc.start()
    assert len(load(letters + copies)) == 9_000
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(6))
def test_truncated_pickles(protocol: int) -> None:
    content = pickle.dumps(DATA[0], protocol)
    for cut in range(0, len(content), 3):
        refused(content[:cut])


def test_things_that_are_no_pickles() -> None:
    for content in (
        b"",
        b".",
        b"hello",
        b"PK\3\4" * 10,
        b"\0" * 99,
        b"a.",
        b"t.",
        b"s.",
        b"R.",
        b"b.",
        b"(u.",
        b"h\0.",
    ):
        refused(content)
