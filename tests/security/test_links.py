"""A run folder from somebody else: what a run reads and writes there is in no other folder."""

import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file

from leaner_kernels.monitor import page
from leaner_kernels.monitor.run_files import open_own, read_own, write_file
from leaner_kernels.monitor.run_log import RunLog
from tests.security.refusals import refusal
from tests.train.launch import TINY
from tests.train.trained import gpt, train_text, train_vit
from train import vit
from train.checkpoint.weights import BEST
from train.export import load

PRECIOUS = "export PRECIOUS=1\n"
PROBE = ["--kappa-probe", "2", "--tensorboard"]
# Names at which a run or a page follows no link, but refuses it.
REFUSED = ["metrics.jsonl", "kappa.jsonl", "kappa_probe.jsonl", "alarms.jsonl", ".lock"]
# Names at which a link is replaced or removed.
REPLACED = [
    *("summary.json", "page.html", "model.safetensors", BEST, "checkpoints/.step-00000004"),
    *(".metrics.jsonl.partial", ".summary.json.partial", ".page.html.partial"),
    *(f".{BEST}.partial", "checkpoints/step-00000004", "checkpoints/.removed-step-00000002"),
    *("checkpoints/.replaced-step-00000004", "checkpoints/.replaced-step-00000009"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = train_vit(tmp_path_factory.mktemp("runs") / "run", "--ckpt-every", "2", *PROBE)
    (out / "summary.json").unlink()
    return out


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "home" / ".bashrc"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    return path


def go_on(run, *more):
    words = [*TINY, "--steps", "4", "--ckpt-every", "2", "--keep", "1", *PROBE]
    vit.main([*words, "--out", str(run), "--resume", *(more or ["auto"])])


def plant(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def assert_untouched(precious):
    assert precious.read_text() == PRECIOUS
    assert os.listdir(precious.parent) == [precious.name]


@pytest.mark.parametrize("target", ["file", "nothing", "folder"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_run_goes_on_through_no_link(run, precious, capsys, name, target):
    targets = {"file": precious, "nothing": precious.with_name("new"), "folder": precious.parent}
    plant(run / name, targets[target])
    with pytest.raises(SystemExit):
        go_on(run)
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("vit.py: error: ")
    assert "is a link" in line
    assert str(run / name) in line
    assert_untouched(precious)


@pytest.mark.parametrize("target", ["file", "nothing", "folder"])
@pytest.mark.parametrize("name", REPLACED)
def test_a_run_writes_through_no_link(run, precious, name, target):
    targets = {"file": precious, "nothing": precious.with_name("new"), "folder": precious.parent}
    plant(run / name, targets[target])
    if name == f".{BEST}.partial":
        (run / BEST).unlink()  # so that better weights are sure to be written
    go_on(run)
    assert_untouched(precious)
    assert load_file(run / "model.safetensors")
    assert not [path for path in run.rglob("*") if path.is_symlink()]
    assert (run / "checkpoints" / "step-00000004").is_dir()


def test_no_link_to_a_checkpoint_is_taken_up_unless_it_is_named(run, tmp_path, capsys):
    own = run / "checkpoints" / "step-00000002"
    own.rename(tmp_path / own.name)
    own.symlink_to(tmp_path / own.name)
    with pytest.raises(SystemExit):
        go_on(run)
    assert "skipped damaged checkpoint step-00000002: is a link" in capsys.readouterr().out
    go_on(tmp_path / "other", str(own))
    assert (tmp_path / "other" / "checkpoints" / "step-00000004").is_dir()


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "shard"])
def test_no_link_in_a_checkpoint_is_read(run, tmp_path, capsys, name):
    (path,) = (run / "checkpoints").glob(f"*/{name}*")
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    line = refusal(capsys, vit.main, *TINY, "--steps", 4, "--out", run, "--resume", "auto")
    assert "no intact checkpoint" in line
    (run / BEST).unlink()
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=name):
        load(run)


def test_folders_of_logs_are_no_links(run, precious, capsys):
    plant(run / "tensorboard", precious.parent)
    line = refusal(
        capsys, vit.main, *TINY, "--steps", 4, "--tensorboard", "--out", run, "--resume", "auto"
    )
    assert f"is a link, and links in a run folder are not followed: '{run / 'tensorboard'}'" in line
    assert_untouched(precious)


def test_the_folders_of_a_run_and_of_its_checkpoints_may_be_links(run, tmp_path):
    (run / "checkpoints").rename(tmp_path / "scratch")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    (tmp_path / "link").symlink_to(run)
    go_on(tmp_path / "link")
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["step-00000004"]
    assert (run / "checkpoints").is_symlink()
    page.main([str(tmp_path / "link")])
    assert (run / "page.html").read_text().startswith("<!")
    assert load(tmp_path / "link", last=True)[1].step == 3  # the last of four


@pytest.mark.parametrize("name", [*REFUSED, "tensorboard", "checkpoints/.step-00000004"])
def test_a_pipe_is_not_waited_for(run, capsys, name):
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.mkfifo(path)
    if name.startswith("checkpoints"):
        go_on(run)
        assert (run / "checkpoints" / "step-00000004").is_dir()
        return
    with pytest.raises(SystemExit):
        go_on(run)
    *_, line = capsys.readouterr().err.splitlines()
    assert "is not a" in line
    assert str(path) in line


@pytest.mark.parametrize("name", [BEST, "model.safetensors"])
def test_weights_in_a_run_are_no_link_but_a_file_that_is_named_may_be(run, tmp_path, name):
    for path in run.glob("*.safetensors"):
        path.rename(tmp_path / path.name)
    (run / name).symlink_to(tmp_path / "model.safetensors")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="is a link"):
        load(run)
    load(run / name)


def test_a_tokeniser_in_a_run_is_no_link(tmp_path):
    run = train_text(gpt, tmp_path / "gpt")
    for path in [*run.glob("*.safetensors"), run / "summary.json"]:
        path.unlink()
    (run / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (run / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json.* is a link"):
        load(run)


@pytest.mark.parametrize("name", ["kappa.jsonl", "metrics.jsonl", "alarms.jsonl"])
def test_a_callback_writes_through_no_link(tmp_path, precious, name):
    plant(tmp_path / "run" / name, precious.with_name("new"))
    with pytest.raises(OSError, match="is a link"):
        RunLog(torch.nn.MultiheadAttention(8, 2), tmp_path / "run")
    assert_untouched(precious)


@pytest.mark.parametrize("name", ["page.html", ".page.html.partial"])
def test_a_page_is_written_through_no_link(run, precious, name):
    plant(run / name, precious)
    page.main([str(run)])
    assert_untouched(precious)
    assert (run / "page.html").read_text().startswith("<!")
    assert not (run / "page.html").is_symlink()


@pytest.mark.parametrize("name", ["kappa.jsonl", "metrics.jsonl", "summary.json"])
def test_a_page_is_read_through_no_link_and_waits_for_no_pipe(run, tmp_path, precious, name):
    for make in (lambda path: path.symlink_to(precious), os.mkfifo):
        (run / name).unlink(missing_ok=True)
        make(run / name)
        with pytest.raises(SystemExit, match=name):
            page.main([str(run), "--out", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


def test_one_function_opens_what_is_regular_and_nothing_else(tmp_path, precious):
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "nowhere").symlink_to(precious.with_name("new"))
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "nowhere", "pipe"):
        for mode in ("rb", "ab", "xb"):
            with pytest.raises(OSError, match=name):
                open_own(tmp_path / name, mode)
    for line in (b"1\n", b"2\n"):
        with open_own(tmp_path / "rows", "ab") as file:
            file.write(line)
    assert read_own(tmp_path / "rows") == b"1\n2\n"
    assert_untouched(precious)


def test_a_link_made_after_the_check_is_not_followed_either(tmp_path, precious, monkeypatch):
    (tmp_path / "link").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("leaner_kernels.monitor.run_files.check_own", lambda path: None)
    for name in ("link", "pipe"):
        for mode in ("rb", "ab"):
            with pytest.raises(OSError, match=name):
                open_own(tmp_path / name, mode)
    assert_untouched(precious)


def test_without_the_flags_of_linux_a_link_is_refused_too(tmp_path, precious, monkeypatch):
    (tmp_path / "link").symlink_to(precious)
    monkeypatch.setattr("leaner_kernels.monitor.run_files._NO_LINK_NO_WAIT", 0)
    with pytest.raises(OSError, match="is a link"):
        open_own(tmp_path / "link", "ab")


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_file(path, None)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
    write_file(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n"


def test_a_file_has_the_mode_of_the_umask(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            for name in ("file", "rows"):
                (tmp_path / name).unlink(missing_ok=True)
            write_file(tmp_path / "file", "")
            open_own(tmp_path / "rows", "ab").close()
        finally:
            os.umask(before)
        for name in ("file", "rows"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
