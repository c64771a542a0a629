"""Files are whole or not there, also when several write the same one, or when something goes wrong."""

import os
import stat
import threading

import pytest

from specbeam.core import whole_files
from specbeam.core.whole_files import delete_leftovers, whole, whole_files_in, write_whole


def test_several_writers_of_one_file_each_write_a_whole_one(tmp_path):
    """The parts are of the same name only in one process at one time, and none is left."""
    path = tmp_path / "file"
    contents = {bytes([65 + number]) * 200_000 for number in range(4)}
    seen = set()

    def write_often(content):
        for _ in range(20):
            write_whole(path, content)
            seen.add(path.read_bytes())

    writers = [threading.Thread(target=write_often, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert seen <= contents
    assert os.listdir(tmp_path) == ["file"]


def test_two_parts_of_one_file_differ(tmp_path):
    with whole(tmp_path / "file") as one, whole(tmp_path / "file") as other:
        assert one != other
        assert one.parent == other.parent == tmp_path
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "file").read_text() == "one"  # whose block ended last


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_goes_wrong_leaves_the_file_before_and_no_part(tmp_path, error):
    path = tmp_path / "file"
    write_whole(path, b"before")

    def write():
        with whole(path) as part:
            part.write_bytes(b"half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync

    def note(number):
        synced.append((stat.S_ISDIR(os.fstat(number).st_mode), (tmp_path / "file").exists()))
        sync(number)

    monkeypatch.setattr(whole_files.os, "fsync", note)
    write_whole(tmp_path / "file", b"content")
    assert synced == [(False, False), (True, True)]
    write_whole(tmp_path / "file", b"other", outlasts_power=False)
    assert len(synced) == 2


def test_a_link_stays_and_devices_are_written_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    for content in (b"one", b"two"):
        write_whole(tmp_path / "link", content)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_bytes() == b"two"
    write_whole(tmp_path / "null", b"")
    (tmp_path / "null").unlink()
    (tmp_path / "null").symlink_to(os.devnull)
    write_whole(tmp_path / "null", b"nothing")
    assert not os.path.isfile(os.devnull)


def test_long_names_have_parts_too(tmp_path):
    path = tmp_path / ("ä" * 127)
    write_whole(path, b"content")
    assert path.read_bytes() == b"content"


def test_several_files_of_a_library_are_each_whole_and_configurations_come_last(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("before")
    (tmp_path / "own.txt").write_text("own")

    def fail():
        with whole_files_in(tmp_path) as parts:
            (parts / "config.json").write_text("half")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": "before", "own.txt": "own"}
    moved = []
    replace = whole_files.Path.replace
    monkeypatch.setattr(whole_files.Path, "replace", lambda path, goal: (moved.append(goal.name), replace(path, goal)))
    with whole_files_in(tmp_path) as parts:
        (parts / "inner").mkdir()
        for name in ("config.json", "weights", "inner/weights"):
            (parts / name).write_text(name)
    assert moved == ["weights", "weights", "config.json"]
    assert (tmp_path / "inner" / "weights").read_text() == "inner/weights"
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "own.txt", "weights", "inner"}


def test_leftovers_of_killed_processes_are_deleted(tmp_path):
    (tmp_path / ".file.1.ab.part").write_text("half")
    (tmp_path / ".some.part" / "inner").mkdir(parents=True)
    (tmp_path / ".some.part" / "inner" / "file").touch()
    (tmp_path / "file").touch()
    delete_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["file"]
