"""A training step of every language row, original and lean, against transformers' models.

On a GPU the forward and the loss run in bfloat16 autocast, over float32 weights, with AdamW fused;
on a CPU everything is float32. Calls come from Python, as in a training loop. Nothing is dropped
out.
"""

from bench.harness.checked import Row, attempt, each_row
from bench.networks.language_cases import LANGUAGE_CASES
from bench.networks.language_gate import LanguageModels, peers_of
from bench.networks.language_peers import differences
from bench.networks.models import trained


@each_row(
    Row(case, name, "training", ours=whose == "leaner")
    for case in LANGUAGE_CASES
    for name, (whose, _) in peers_of(case).items()
)
def test_language(row, benchmark, current, unmeasured, seconds_left):
    case = row.case
    with attempt(unmeasured, seconds_left, row):
        models = current.use(case, LanguageModels)
        budget_used = models.check(row.name)
        info = trained(row, benchmark, models.training(row.name), "token", case.tokens)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        **row.facts(),
        kind="language",
        differs=None if row.ours else differences(case.architecture, peers_of(case)[row.name][0]),
        tokens_per_s=case.tokens / benchmark.stats.stats.median,
        printed_memory_gb=case.entry.printed.get("memory_gb"),
        budget_used=budget_used,
        **info,
    )
