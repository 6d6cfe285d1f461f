import os
import resource
import stat
import sys

import pytest

from openquant.errors import SourceError
from openquant.files.small_files import parse_json, read_small


def test_a_link_to_a_regular_file_is_read(tmp_path):
    (tmp_path / "blob").write_bytes(b"abc")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_small(tmp_path / "config.json", "config.json", 3) == b"abc"


def test_what_is_no_small_regular_file_is_refused_at_once(subtests: pytest.Subtests, tmp_path) -> None:
    for number, kind in enumerate(["pipe", "device", "directory", "socket", "too large"]):
        with subtests.test(kind=kind):
            here = tmp_path / str(number)
            here.mkdir()
            path = here / "config.json"
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "device":
                path.symlink_to("/dev/zero")
            elif kind == "directory":
                path.mkdir()
            elif kind == "socket":
                os.mknod(path, stat.S_IFSOCK | 0o600)
            else:
                path.write_bytes(b"abcd")
            expected = "config.json is larger than 3 bytes" if kind == "too large" else "config.json is not a regular file"
            with pytest.raises(SourceError) as caught:
                read_small(path, "config.json", 3)
            assert caught.value.message == expected


def test_what_is_too_large_is_refused_unread(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SourceError, match="^it is larger than 1,073,741,824 bytes"):
        read_small(tmp_path / "sparse", "it", 1 << 30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18


def test_what_is_no_name_of_a_file_is_an_error_of_the_source(subtests: pytest.Subtests, tmp_path) -> None:
    for number, name in enumerate(["a\0b", "\ud800"]):
        with subtests.test(name=name):
            here = tmp_path / str(number)
            here.mkdir()
            with pytest.raises(SourceError, match="^it is no name that a file can have$"):
                read_small(here / name, "it")


JSON_THAT_ENGINES_WOULD = [
        ("{}".encode("utf-16"), "is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
        ("\ufeff{}".encode(), "is not valid JSON: Unexpected UTF-8 BOM"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b"[" * 65 + b"]" * 65, "is nested more than 64 levels deep"),
        (b"[" * 10**6, "is not valid JSON: "),
        (b"1" * (sys.get_int_max_str_digits() + 1), "is not valid JSON: Exceeds the limit"),
    ]


def test_json_that_engines_would_not_read_is_refused(subtests: pytest.Subtests) -> None:
    for data, problem in JSON_THAT_ENGINES_WOULD:
        with subtests.test(data=data, problem=problem):
            with pytest.raises(SourceError, match=f"^index {problem}"):
                parse_json(data, "index")


def test_json_may_be_as_deep_as_the_bound():
    assert parse_json(b"[" * 64 + b"]" * 64, "index")
