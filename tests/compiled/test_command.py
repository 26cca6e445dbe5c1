"""``python -m bench.gpu_model``: what is wrong with a kernel shows in what it prints."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("set LEANER_EXECUTE=1, in a process of its own", allow_module_level=True)

from bench.gpu_model import command, machine_code, units
from bench.gpu_model.execute import executing


@triton.jit
def _products_kernel(x_ptr, out_ptr, rounds, DEPTH: tl.constexpr, BARRIER: tl.constexpr):
    rows, cols = tl.arange(0, 64)[:, None] * 64, tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + rows + tl.arange(0, DEPTH)[None, :])  # (64, DEPTH)
    decaying = tl.load(x_ptr + rows + cols).to(tl.float32)
    sums = tl.zeros([64, 64], tl.float32)
    for _ in range(rounds):
        for _ in tl.static_range(64 // DEPTH):
            sums = tl.dot(x, x.T, sums)
        decaying = decaying * 0.5 + 1.0
        if BARRIER:
            tl.debug_barrier()
    tl.store(out_ptr + rows + cols, (sums + decaying).to(x.dtype))


def described(depth: int = 64, barrier: bool = False, **options: int) -> str:
    """Return what the command prints of products in a loop, in as many calls as depths need."""
    x = torch.randn(64, 64).bfloat16()
    with executing(90, count=True) as executions:
        _products_kernel[1,](x, torch.empty_like(x), 40, depth, barrier, num_warps=4, **options)
    (execution,) = executions
    return "\n".join(command.describe(command.predict(execution, 90, 132.0), 4))


def predicted(text: str) -> float:
    """Return the predicted µs, without what any launch takes."""
    found = re.search(r"predicted on H200: ([\d,.]+) µs", text)
    assert found is not None, text
    return float(found[1].replace(",", "")) - 1e6 * units.MODELS[90].launch


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert not ended.value.code
    return capsys.readouterr().out


def floor(text: str, unit: str) -> float:
    found = re.search(rf"{unit} ([\d,.]+)", text)
    assert found is not None, text
    return float(found[1].rstrip(",").replace(",", ""))


def test_a_kernel_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "predictions.json"
    text = printed(capsys, "vit_base", "--only", "forward", "--json", str(written))
    assert "_hopper_fwd_kernel: 4 x 1 x 1 programs of 4 warps" in text
    assert "FOUND" not in text
    # HGMMA: scores over a depth of 64, and as much for the output. Three tiles of 64 rows against
    # 208 keys, four of keys against the 16 rows of the tail.
    scores = 3 * 64 * 208 + 4 * 64 * 16
    assert floor(text, "tensor cores") == pytest.approx(
        1e6 * 128 * 16 * 2 * 2 * 64 * scores / (989e12 * 1.98 / 1.83), rel=0.05
    )

    assert predicted(text) > 50
    rows = json.loads(written.read_text("utf-8"))["rows"]
    assert [(row["gpu"], row["stage"]) for row in rows] == [
        ("H200", "forward"),
        ("H100", "forward"),
    ]
    assert rows[0]["predicted"] == pytest.approx(
        1e-6 * predicted(text) + units.MODELS[90].launch, rel=0.01
    )
    assert "warps wait for: " in text
    assert re.search(r"and at: \w+\.py:\d+ \d+%", text)


def test_defects_in_a_loop_show() -> None:
    """Products that wait for each other, a barrier in each round, registers that do not suffice."""
    good = described()
    waiting, meeting, spilling = described(depth=16), described(barrier=True), described(maxnreg=64)
    assert predicted(waiting) > 1.5 * predicted(good)
    assert predicted(meeting) >= predicted(good)  # where the product takes longer, it costs nothing
    assert predicted(spilling) > 1.02 * predicted(good)


def test_what_cannot_be_timed_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "MAX_DIFFERENCE", -1.0)
    text = described()
    assert re.search(r"^  not timed: the way through its blocks differs", text, re.MULTILINE)
    assert "predicted floors on H200" in text
