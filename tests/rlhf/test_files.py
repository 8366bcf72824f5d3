import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.files import output_folder_problems, output_problems, write_whole


def test_writes_text_or_bytes_and_makes_folders(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "deep" / "text", "é\n")
    write_whole(tmp_path / "new" / "bytes", b"\x00")
    assert (tmp_path / "new/deep/text").read_bytes() == b"\xc3\xa9\n"
    assert (tmp_path / "new/bytes").read_bytes() == b"\x00"


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["answer"]


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "answer")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "answer").read_text() == "new"
    write_whole(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


def test_pipes_are_written_to(tmp_path: Path) -> None:
    program = "import sys, pathlib; from rlhf.files import *; p = pathlib.Path(sys.argv[1]); write_whole(p, 'answer'); "
    program += "print(output_problems({'--out': p}))"
    for place in ("/dev/stdout", "/dev/fd/1"):
        done = subprocess.run([sys.executable, "-c", program, place], stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout == "answer[]\n"
        with (tmp_path / "file").open("w+") as file:
            file.write("kept ")
            file.flush()
            subprocess.run([sys.executable, "-c", program, place], stdout=file, check=True)
        assert (tmp_path / "file").read_text() == "kept answer[]\n"
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        write_whole(tmp_path / "pipe", "through")
        assert reader.communicate()[0] == b"through"
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_to_a_file_not_there_yet_makes_it_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "new" / "answer")
    assert output_problems({"--out": tmp_path / "link"}) == []
    write_whole(tmp_path / "link", "answer")
    assert (tmp_path / "new/answer").read_text() == "answer"


def test_an_answer_keeps_the_rights_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "answer").touch(mode=0o600)
    write_whole(tmp_path / "answer", "secret")
    assert (tmp_path / "answer").stat().st_mode & 0o777 == 0o600


def test_shared_memory_is_no_device() -> None:
    place = Path("/dev/shm/rlhf-sweep-test/answer")
    if not place.parents[1].is_dir():
        pytest.skip("this system has no /dev/shm")
    assert "is the same file as the input" in output_problems({"--out": place}, inputs=[place])[0]


def test_a_failure_names_the_place_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="exists") as caught:
        write_whole(tmp_path / "file" / "x", "")
    assert caught.value.filename == str(tmp_path / "file" / "x")


def test_places_that_no_system_has_are_problems_too(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert output_problems({"--a": tmp_path / "answer"}, inputs=[tmp_path / "loop"]) == []
    assert "is a link to nothing" in output_folder_problems("--out", tmp_path / "loop")[0]
    problems = output_problems({"--a": tmp_path / "loop", "--b": tmp_path / ("x" * 300), "--c": tmp_path / "r",
                                "--d": tmp_path / "r" / "d"})  # fmt: skip
    assert [problem.split()[0] for problem in problems] == ["--a", "--b", "--d"]
    assert "one lies in the other" in problems[2]


def test_every_place_that_cannot_be_written_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    problems = output_problems(
        {"--a": tmp_path, "--b": tmp_path / "file" / "x", "--c": tmp_path / "new" / "x", "--d": tmp_path / "new" / "x",
         "--e": tmp_path / "link", "--f": None, "--g": Path()},
        inputs=[tmp_path / "file"],
    )  # fmt: skip
    assert problems == [
        f"--a must name a file, got the folder {tmp_path}; add a file name",
        f"--b {tmp_path / 'file/x'}: {tmp_path / 'file'} is not a folder that can be written to; give another place",
        f"--d {tmp_path / 'new/x'} is the same file as --c; give another place",
        f"--e {tmp_path / 'link'} is the same file as the input {tmp_path / 'file'}; give another place",
        "--g must name a file, got the folder .; add a file name",
    ]


def test_a_folder_for_output_can_be_made_and_is_empty_where_it_must_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert output_folder_problems("--out", None) == []
    assert output_folder_problems("--out", tmp_path / "new" / "deep", empty=True) == []
    assert output_folder_problems("--out", tmp_path, new=("other",)) == []
    assert output_folder_problems("--out", tmp_path, new=("file", "other")) == [
        f"--out {tmp_path}: already holds file; give another folder"
    ]
    assert output_folder_problems("--out", tmp_path, empty=True) == [
        f"--out {tmp_path}: already holds files; give a new or empty folder"
    ]
    for below in ("file", "file/x"):
        assert output_folder_problems("--out", tmp_path / below) == [
            f"--out {tmp_path / below}: {tmp_path / 'file'} is not a folder that can be written to; give another place"
        ]
