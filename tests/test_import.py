"""`import leaner_kernels` needs torch alone: no Triton, no GPU, nothing that an extra brings."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HIDE_ALL_BUT_TORCH = """
import sys

class Hide:
    hidden = {
        *("triton", "timm", "transformers", "torchvision", "sklearn", "rich"),
        "matplotlib",
    }

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Hide())
"""

USE_THE_LIBRARY = """
import torch
import leaner_kernels
from leaner_kernels.nn import ManyHeadAttention

for name in leaner_kernels.__all__:
    getattr(leaner_kernels, name)

q, k, v = torch.randn(3, 2, 5, 49, 10, requires_grad=True).unbind(0)
out = leaner_kernels.attention(q, k, v)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
torch.testing.assert_close(out, expected)
out.sum().backward()

model = ManyHeadAttention(30, num_heads=5, head_dim=10)
monitor = leaner_kernels.KappaMonitor(model, every=1, samples=1)
monitor.begin(0)
model(torch.randn(2, 49, 30)).sum().backward()
(row,) = monitor.end()
assert row["resolved"], row
"""

LOADED_BY_IMPORT = """
import sys
import torch

before = set(sys.modules)
import leaner_kernels

loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded & {"triton", "timm", "transformers", "numpy", "matplotlib"}))
"""


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_alone_is_enough_to_import_attend_and_watch_kappa():
    python(HIDE_ALL_BUT_TORCH + USE_THE_LIBRARY)


def test_importing_loads_no_optional_library_even_where_it_is_installed():
    assert python(LOADED_BY_IMPORT) == ""
