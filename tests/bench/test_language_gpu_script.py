"""`bench/gpu.sh` and the language rows: their steps, their kernel, and ListOps trained in full."""

import re

import pytest

from bench.attention.bench_attention import rows
from tests.bench import test_gpu_script as script

checkout = script.checkout
# The report takes seconds, and other tests show it.
PRETEND = (
    script.PRETEND.replace('exec "$PYTHON" "$@"', "exit 0")
    + """
case $* in
  *train/lra.py*) exit "${LEARNS:-0}" ;;
esac
"""
)


@pytest.fixture
def calls(checkout, tmp_path):
    """Run the script in a checkout whose python3 pretends; return how it ended and its calls."""
    (checkout / "bin/python3").write_text(PRETEND)

    def calls(*arguments, **environment):
        done = script.pretend(checkout, tmp_path, *arguments, **environment)
        return done, (tmp_path / "calls").read_text()

    return calls


def test_the_kernel_of_language_rows_is_checked_before_they_take_a_step(calls):
    done, text = calls("first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-k one_of_each or" in text
    checked = [row.id for row in rows() if any(m.name == "one_of_each" for m in row.marks)]
    assert "nystrom_listops-both-eager-leaner" in checked
    done, text = calls("rows")
    assert "bench/networks/bench_models.py bench/networks/bench_language.py" in text
    assert "train/lra.py" not in text
    assert script.STAGES.index("first") < script.STAGES.index("rows")


def test_listops_is_trained_in_full_and_nothing_is_measured(calls, tmp_path):
    done, text = calls("listops_seeds")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-m pytest" not in text
    runs = re.findall(r"train/lra.py --task listops --model (\S+) --seeds 5 (.*)", text)
    assert [name for name, _ in runs] == ["nystromformer_listops_lean", "nystromformer_listops"]
    for name, rest in runs:
        out = tmp_path / "out"
        assert rest == f"--resume auto --out {out}/{name} --cache {out}/data"
    assert "nystromformer_listops, five seeds: passed" in done.stdout


def test_a_run_that_fails_is_the_exit_status_and_the_next_one_runs(calls):
    done, text = calls("listops_seeds", LEARNS="3")
    assert done.returncode == 1
    assert "nystromformer_listops_lean, five seeds: FAILED with status 3" in done.stdout
    assert text.count("train/lra.py") == 2
