"""Models of transformers and timm as a user has them, before and after the one line of an adapter.

Each is measured with the attention that its library calls, with ours, and with ours on a step of
which KappaMonitor takes a sample. Before that, outputs and gradients pass the error budget.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness.gate import WrongError, away_from_the_start, share_of_budget
from bench.harness.peers import found
from leaner_kernels import KappaMonitor

# Of the rows of bench_adapters.py: what marks them, and whose attention they are of.
KIND = "adapter"
LIBRARY, LEANER, MONITORED = "library", "leaner", "leaner_kappa"
DIRECTIONS = "forward", "both"
SAMPLES = 4


@dataclass(frozen=True)
class AdapterCase:
    """A model of somebody else, and a batch.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        library: ``transformers`` or ``timm``.
        family: as in the tests of the adapters.
        model: transformers' model type, or timm's name.
        batch: sequences or images.
        size: tokens of a sequence, or pixels of a side.
        sizes: of the configuration, or arguments of timm's constructor.
        padded: whether sequences differ in length, from half of ``size`` up, with a mask.
    """

    name: str
    device: str
    library: str
    family: str
    model: str
    batch: int
    size: int
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    padded: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of everything computed."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        items = f"{self.size} tokens" if self.library == "transformers" else f"{self.size}² pixels"
        padded = ", padded from half of that" if self.padded else ""
        # No dropout and no token that ends a text: their sizes do not matter.
        sizes = "".join(f", {name} {value}" for name, value in self.sizes.items() if value)
        return {
            "device": self.device,
            "dtype": str(self.dtype).removeprefix("torch."),
            "library": self.library,
            "family": self.family,
            "op": f"{self.library} {self.model}",
            "size": f"{self.batch} × {items}{padded}{sizes}",
        }

    def new(self) -> nn.Module:
        """Return the model with its library's attention, without dropout, on the default device.

        Raises:
            AbsentError: the library is not installed.
        """
        if self.library == "timm":
            return found("timm", "create_model")(self.model, img_size=self.size, **self.sizes)
        config = found("transformers", "AutoConfig").for_model(self.model, **self.sizes)
        return found("transformers", "AutoModel").from_config(config, attn_implementation="sdpa")

    def build(self, device: torch.device) -> nn.Module:
        """Return ``new`` on a device in evaluation mode, with values from a fixed seed.

        Raises:
            AbsentError: as ``new``.
        """
        torch.manual_seed(0)
        with device:
            model = self.new().float()
        away_from_the_start(model, torch.Generator(device).manual_seed(0))
        return model.to(self.dtype).eval()

    def draw(self, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of the model, from a fixed seed."""
        generator = torch.Generator(device).manual_seed(0)
        on = {"device": device, "generator": generator}
        if self.library == "timm":
            images = torch.randn(self.batch, 3, self.size, self.size, **on)
            return {"x": images.to(self.dtype)}
        tokens = torch.randint(1, self.sizes["vocab_size"], (self.batch, self.size), **on)
        if not self.padded:
            return {"input_ids": tokens}
        lengths = torch.linspace(self.size // 2, self.size, self.batch, device=device).long()
        mask = torch.arange(self.size, device=device) < lengths[:, None]
        return {"input_ids": tokens, "attention_mask": mask.long()}


def _gpt2(**sizes: int) -> dict[str, Any]:
    names = {"tokens": "n_positions", "width": "n_embd", "depth": "n_layer", "heads": "n_head"}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    none |= {"bos_token_id": 0, "eos_token_id": 0}  # within any vocabulary
    return {names.get(name, name): value for name, value in sizes.items()} | none


BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

ADAPTER_CASES = (
    AdapterCase(
        *("adapter_llama", "cuda", "transformers", "llama", "llama", 4, 2048),
        # Half of Llama 3.2 1B, with the vocabulary of Llama 2: what the gate keeps of the whole in
        # float64, scores included, does not fit into 80 GB.
        {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192}
        | {"num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    AdapterCase(
        *("adapter_bert", "cuda", "transformers", "bert", "bert", 64, 128),
        {"vocab_size": 30522, **BERT},
        padded=True,
    ),
    AdapterCase(
        *("adapter_gpt2", "cuda", "transformers", "gpt2", "gpt2", 16, 512),
        _gpt2(vocab_size=50257, tokens=512),
    ),
    AdapterCase("adapter_vit", "cuda", "timm", "vit", "vit_base_patch16_224", 128, 224),
    AdapterCase("adapter_xcit", "cuda", "timm", "xcit", "xcit_medium_24_p16_224", 64, 224),
    AdapterCase("adapter_swin", "cuda", "timm", "swin", "swin_base_patch4_window7_224", 64, 224),
    AdapterCase(
        *("cpu_adapter_llama", "cpu", "transformers", "llama", "llama", 2, 128),
        {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
        | {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    AdapterCase(
        *("cpu_adapter_bert", "cpu", "transformers", "bert", "bert", 4, 128),
        {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, **BERT},
        padded=True,
    ),
    AdapterCase(
        *("cpu_adapter_gpt2", "cpu", "transformers", "gpt2", "gpt2", 2, 128),
        _gpt2(vocab_size=512, tokens=128, width=128, depth=2, heads=4),
    ),
    AdapterCase(
        *("cpu_adapter_vit", "cpu", "timm", "vit", "vit_tiny_patch16_224", 2, 112),
        {"depth": 2, "num_classes": 10},
    ),
    AdapterCase(
        *("cpu_adapter_xcit", "cpu", "timm", "xcit", "xcit_nano_12_p16_224", 2, 112),
        {"depth": 2, "num_classes": 10},
    ),
    AdapterCase(
        *("cpu_adapter_swin", "cpu", "timm", "swin", "swin_tiny_patch4_window7_224", 2, 56),
        {"embed_dim": 48, "depths": (2, 2), "num_heads": (3, 6), "num_classes": 10},
    ),
)


def peers(direction: str) -> tuple[str, ...]:
    """Return whose attention is measured; a sample is taken of a step, which has a backward."""
    return (LIBRARY, LEANER, MONITORED) if direction == "both" else (LIBRARY, LEANER)


def adapt(library: str, model: nn.Module) -> None:
    """Put our attention into a model, by the line that the adapter's documentation shows.

    Raises:
        AbsentError: the library is too old for its adapter.
    """
    adapter = f"leaner_kernels.adapters.{library}"
    if library == "timm":
        found(adapter, "use")(model)
    else:
        found(adapter, "register")()
        model.set_attn_implementation("leaner")


class AdapterModels:
    """What an ``AdapterCase`` is measured on: the model before and after, its batch, the truth."""

    def __init__(self, case: AdapterCase):
        """Build both with the same weights.

        Raises:
            AbsentError: the library is not installed, or too old.
        """
        device = torch.device(case.device)
        self.case = case
        self.models = {LIBRARY: case.build(device)}
        self.models[LEANER] = copy.deepcopy(self.models[LIBRARY])
        adapt(case.library, self.models[LEANER])
        self.given = case.draw(device)
        self.grad = torch.randn_like(self.out(self.models[LIBRARY], self.given))
        self.truth = cache(self._truth)

    def out(self, model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        """Return the logits of images, or the last states (B, N, width) of tokens."""
        out = model(**given)
        return out if self.case.library == "timm" else out.last_hidden_state

    def infer(self, name: str) -> Tensor:
        """Run a forward that keeps nothing."""
        with torch.no_grad():
            return self.out(self.models[name], self.given)

    def step(self, name: str) -> tuple[Tensor | None, ...]:
        """Run a forward and a backward to every weight; return the gradients."""
        model = self.models[name]
        return self._gradients(model, self.out(model, self.given), self.grad)

    def monitored_step(self, monitor: KappaMonitor) -> tuple[Tensor | None, ...]:
        """Take ``step`` with our attention while the monitor samples it, and measure the sample."""
        monitor.begin(0)
        gradients = self.step(LEANER)
        monitor.end()
        return gradients

    def call(self, direction: str, name: str) -> Callable[[], Any]:
        """Return what is timed."""
        if name == MONITORED:
            return partial(self.monitored_step, self.monitor())
        return partial(self.infer if direction == "forward" else self.step, name)

    def monitor(self) -> KappaMonitor:
        """Return a monitor of the model with our attention that samples every step."""
        return KappaMonitor(self.models[LEANER], every=1, samples=SAMPLES)

    @staticmethod
    def _gradients(model: nn.Module, out: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The pooler of BERT has no part in the last states.
        return torch.autograd.grad(out, tuple(model.parameters()), grad, allow_unused=True)

    def _checked(self, model: nn.Module) -> list[list[Tensor]]:
        """Return the output and the gradients of the first and the last entry of the batch."""
        ends = slice(None, None, max(1, self.case.batch - 1))
        dtype = next(model.parameters()).dtype
        given = {name: value[ends] for name, value in self.given.items()}
        given = {name: v.to(dtype) if v.is_floating_point() else v for name, v in given.items()}
        out = self.out(model, given)
        gradients = self._gradients(model, out, self.grad[ends].to(dtype))
        return [[out.detach()], [g for g in gradients if g is not None]]

    def _truth(self) -> list[tuple[list[Tensor], float]]:
        """Return what the library computes in float64, and the errors allowed.

        All gradients count as one vector: some are zero but for rounding, as of a key's bias.
        """
        exact = self._checked(copy.deepcopy(self.models[LIBRARY]).double())
        same_dtype = self._checked(self.models[LIBRARY])
        eps = torch.finfo(self.case.dtype).eps
        return [
            (e, 2 * (largest_error(s, e) + eps * max(t.abs().max().item() for t in e)))
            for e, s in zip(exact, same_dtype, strict=True)
        ]

    def check(self, name: str) -> float:
        """Compare a model's output and gradients with the truth, while monitored if it is to be.

        Returns:
            The larger error as a fraction of the error allowed.

        Raises:
            WrongError: it is above 1, or not a number; or the monitor saw no layer.
        """
        monitor = self.monitor() if name == MONITORED else None
        if monitor is not None:
            monitor.begin(0)
        results = self._checked(self.models[LIBRARY if name == LIBRARY else LEANER])
        if monitor is not None and not [*monitor.end(), *monitor.flush()]:
            raise WrongError("the monitor returned no row")
        return max(
            share_of_budget(what, largest_error(result, exact), allowed)
            for what, result, (exact, allowed) in zip(
                ("output:", "gradients:"), results, self.truth(), strict=True
            )
        )


def largest_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest difference of all elements; nan where one is not a number."""
    differences = [(r.double() - e).abs().max().item() for r, e in zip(results, exact, strict=True)]
    # Of Python's numbers, max would hide a nan that is not the first.
    return torch.tensor(differences, dtype=torch.float64).max().item()
