import os
import stat
import sys

import pytest

from openquant.errors import SourceError
from openquant.files.model_files import parse_json, read_small


def test_what_is_no_small_regular_file_is_refused_at_once(subtests: pytest.Subtests, tmp_path) -> None:
    kinds = {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "directory": lambda path: path.mkdir(),
        "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
        "too large": lambda path: path.write_bytes(b"abcd"),
    }
    for kind, make in kinds.items():
        with subtests.test(kind):
            make(tmp_path / kind)
            says = "is larger than 3 bytes" if kind == "too large" else "is not a regular file"
            with pytest.raises(SourceError, match=f"^config.json {says}"):
                read_small(tmp_path / kind, "config.json", 3)


BROKEN_JSON = [
    ("{}".encode("utf-16"), "begins with a byte-order mark, which engines do not read"),
    ("\ufeff{}".encode(), "begins with a byte-order mark, which engines do not read"),
    (b"{", "is not valid JSON: Expecting property name"),
    (b"[" * 10**6, "is not valid JSON: "),
    (b"1" * (sys.get_int_max_str_digits() + 1), "is not valid JSON: Exceeds the limit"),
]


def test_json_that_engines_would_not_read_is_refused(subtests: pytest.Subtests) -> None:
    for data, problem in BROKEN_JSON:
        with subtests.test(problem), pytest.raises(SourceError, match=f"^index {problem}"):
            parse_json(data, "index")


def test_what_is_no_name_of_a_file_is_an_error_of_the_source(tmp_path) -> None:
    with pytest.raises(SourceError, match="^it is no name that a file can have"):
        read_small(tmp_path / "a\0b", "it")
