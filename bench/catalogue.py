"""List all cases and their peers in bench/README.md, in the order in which they are measured."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.attention import catalogue as attention
from bench.attention.cases import AttentionCase
from bench.attention.catalogue import ATTENTION_CASES
from bench.attention.operators import OperatorCase
from bench.harness import command, steps
from bench.kappa import spectra
from bench.kappa.spectra import MATRIX_CASES, MatrixCase
from bench.networks import gate
from bench.networks.cases import PAPER_CASES, STEP_CASES, PaperCase, StepCase
from bench.networks.modes import MODELS, mode_of, whose

# What bench/gpu.sh checks before anything is timed: a shape of each kind of attention.
ONE_OF_EACH = (
    *("vit_base", "xcit_m", "volo_d3_outlook", "davit_channel3", "davit_window3"),
    "nystrom_listops",
)
# A run on borrowed time may end anywhere, so cases with goals come first.
FIRST = (
    *("vit_base", "kappa_197x1024", "vit_base_lean_step"),
    *("xcit_m", "volo_d3_outlook", "davit_channel3", "davit_window3"),
    *("nystrom_listops", "nystrom_listops_lean", "model_vit_base_original", "model_vit_base_lean"),
    *("language_crammed_bert_original", "language_crammed_bert_lean"),
    *("language_gpt2_tinystories_original", "language_gpt2_tinystories_lean"),
    *("bert", "gpt2_64", "vit_large"),
)
REGISTERED = (*MATRIX_CASES, *PAPER_CASES, *ATTENTION_CASES, *STEP_CASES)
IN_ORDER = sorted(
    REGISTERED,
    key=lambda case: FIRST.index(case.name) if case.name in FIRST else len(FIRST),
)
# The expression that selects what tells most without a GPU: what `pytest bench/` measures there,
# unless it is given another.
OVERVIEW = (
    "(cpu_kappa_197x1024 or cpu_vit_step-every-10 or cpu_language"
    " or (cpu_model and training and not timm_leaner)"
    " or (both-wall and (cpu_xca or cpu_channel or cpu_window or cpu_outlook or cpu_nystrom)"
    " and not stats)"
    " or (both-wall and (cpu_vit or cpu_ragged) and (leaner or sdpa or eager)))"
    " and not compiled and not unsampled"
)
# What everybody has without us, the first of these that was measured.
DEFAULTS = (
    *("timm", "timm_compiled", "torch_varlen", "sdpa", "sdpa_packed", "sdpa_padded", "svdvals"),
    *("transformers", "transformers_compiled"),
)
# In addition to the size of a case.
NO_SIZE = "device", "op", "row", "variant", "same", "padded", "pairs"
README = Path(__file__).with_name("README.md")
MARK = "<!-- what follows is written by python -m bench.catalogue -->\n"
SUBJECTS = {
    "Softmax attention": AttentionCase,
    "Attention of XCiT, DaViT, VOLO and Nyströmformer": OperatorCase,
    "Condition numbers": MatrixCase,
    "Training steps with κ": StepCase,
    "Models": PaperCase,
}


def size(facts: dict[str, Any]) -> str:
    """Return the size of a case: B·H·N·D of attention, or the description of another case.

    N is 1×197 where one query meets 197 keys, and 49…256 where sequences differ in length.
    """
    if "head_dim" in facts and "lengths" in facts:
        tokens = str(facts["tokens"])
        if facts["lengths"]:
            tokens = f"{min(facts['lengths'])}…{tokens}"
        elif facts["rows"] != facts["tokens"]:
            tokens = f"{facts['rows']}×{tokens}"
        heads = f"{facts['batch']}·{facts['heads']}·{tokens}·{facts['head_dim']}"
        window = f" window {facts['window']}" if "window" in facts else ""
        return f"{heads} {facts['dtype']}" + " causal" * facts["causal"] + window
    if "size" in facts:
        return f"{facts['size']}, {facts['dtype']}"
    words = []
    for name, value in facts.items():
        if name not in (*NO_SIZE, "dtype"):
            # A model with stages has one number per stage.
            shown = "·".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            words.append(f"{name} {shown}".replace("_", " "))
    return ", ".join([*words, facts["dtype"]])


def sentences(case: Any) -> dict[str, str]:
    """Return what each row of a case is, by the name of the row's peer: a sentence for a legend."""
    if isinstance(case, StepCase):
        monitored = "Training with KappaMonitor, which samples one step in"
        return {f"every={n}": f"{monitored} {n}" for n in steps.EVERY}
    if isinstance(case, PaperCase):
        return {name: f"{MODELS[whose(name)]}, {mode_of(name)}" for name in gate.peers_of(case)}
    subject = spectra if isinstance(case, MatrixCase) else attention
    return {name: peer.about for name, peer in subject.peers_of(case).items()}


def legend(cases: Iterable[Any]) -> dict[str, str]:
    """Return the sentences of all rows of some cases; two where a name stands for two things."""
    words: dict[str, dict[str, None]] = {}
    for case in cases:
        for name, sentence in sentences(case).items():
            words.setdefault(name, {})[sentence] = None
    return {name: "; or ".join(several) for name, several in words.items()}


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command of this folder, and the first line of its help."""
    for path in sorted(README.parent.glob("*.py")):
        text = path.read_text("utf-8")
        if "__main__" in text:
            documentation = ast.get_docstring(ast.parse(text)) or ""
            yield f"`python -m bench.{path.stem}`", documentation.splitlines()[0]


def page() -> str:
    """Return bench/README.md, with what follows its mark made anew."""
    parts = [README.read_text("utf-8").partition(MARK)[0] + MARK]
    parts += ["## Commands\n", _table(("command", "description"), commands())]
    left = list(IN_ORDER)
    for title, kind in SUBJECTS.items():
        cases = [case for case in left if isinstance(case, kind)]
        left = [case for case in left if case not in cases]
        rows = [(f"`{case.name}`", size(case.facts())) for case in cases]
        parts += [f"## {title}\n", _table(("case", "size"), rows)]
        rows = [(f"`{name}`", sentence) for name, sentence in legend(cases).items()]
        parts += [_table(("peer", "description"), rows)]
    return "\n".join(parts)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, [":--" for _ in headers], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write the page."""
    command.parser("bench.catalogue", __doc__).parse_args(arguments)
    README.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
