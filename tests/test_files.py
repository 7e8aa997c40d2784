"""Files that appear whole or not at all."""

import os

import pytest

from gdpa.errors import GdpaError
from gdpa.files import check_target, replacing


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["rows.json"]


@pytest.mark.parametrize(("problem", "raised"), [(OSError(28, "No space left on device"), GdpaError), (KeyError("x"), KeyError)])
def test_what_goes_wrong_leaves_the_old_file_and_nothing_else(tmp_path, problem, raised):
    path = tmp_path / "rows.json"
    path.write_text("old")

    def fail():
        with replacing(path) as partial:
            partial.write_text("ne")
            raise problem

    with pytest.raises(raised):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["rows.json"]


def test_a_symbolic_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "rows.json"
    path.write_text("old")
    link = tmp_path / "link"
    link.symlink_to(path)
    with replacing(link) as partial:
        partial.write_text("new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_pipes_devices_and_folders_are_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "none" / "rows.json"):
        with pytest.raises(GdpaError, match="--json: expected a file in a folder that can be written"):
            check_target("--json", path)
        with pytest.raises(GdpaError), replacing(path):
            pytest.fail("a name to write to")
    assert pipe.is_fifo()


def test_a_read_only_file_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text("old")
    path.chmod(0o444)
    # Root may write anywhere; everybody else is told so.
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda name, mode: access(name, mode) and (mode != os.W_OK or os.stat(name).st_mode & 0o200 > 0)
    )
    with pytest.raises(GdpaError, match="--json: expected a file that can be written, got .* which is read-only"):
        check_target("--json", path)
    with pytest.raises(GdpaError), replacing(path):
        pytest.fail("a name to write to")
    assert path.read_text() == "old"


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(GdpaError, match="expected the name of a file"):
        check_target("--json", tmp_path / ("x" * 300))
    with pytest.raises(GdpaError, match="could not be written"), replacing(tmp_path / ("x" * 250)) as partial:
        partial.write_text("new")
