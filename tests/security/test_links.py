"""Links in the folder of a run: a page is written through none."""

import shutil

import pytest

from leaner_kernels.monitor import page
from tests.train.trained import train_vit

PRECIOUS = "export PRECIOUS=1\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_vit(tmp_path_factory.mktemp("runs") / "run", "--ckpt-every", "2")


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "home" / ".bashrc"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    return path


def plant(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["page.html", ".page.html.partial"])
def test_a_page_is_written_through_no_link(trained, tmp_path, precious, name):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    plant(run / name, precious)
    page.main([str(run)])
    assert precious.read_text() == PRECIOUS
    assert (run / "page.html").read_text().startswith("<!")
    assert not (run / "page.html").is_symlink()
