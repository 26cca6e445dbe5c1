"""The steps from the theorem to real heads, on heads whose steps are known."""

import json
import math

import pytest
import torch

from models.vit import VisionTransformer
from studies import runner, theorem_gap
from studies.study import Claim

N, WIDTH = 16, 128
gaussian = torch.randn(256, N, WIDTH, generator=torch.Generator().manual_seed(1))


def test_gaussian_heads_are_as_the_theorem_says_in_every_step() -> None:
    steps = theorem_gap.ladder(gaussian)
    for step in ("covariance", "centred", "real"):
        assert steps[step] == pytest.approx(steps["theorem"], abs=0.06)


def test_a_mean_over_tokens_is_seen_in_the_last_step_alone() -> None:
    steps = theorem_gap.ladder(gaussian + 5 * torch.randn(256, 1, WIDTH))
    assert steps["centred"] == pytest.approx(steps["theorem"], abs=0.06)
    assert steps["real"] > steps["centred"] + 0.5


def test_a_covariance_is_seen_from_its_step_on() -> None:
    scales = torch.logspace(0, -2, WIDTH)
    steps = theorem_gap.ladder(gaussian * scales)
    assert steps["covariance"] > steps["theorem"] + 0.3
    assert steps["centred"] == pytest.approx(steps["covariance"], abs=0.05)
    assert steps["real"] == pytest.approx(steps["covariance"], abs=0.05)


def test_heads_are_those_of_every_layer_and_captures_end() -> None:
    model = VisionTransformer(
        image_size=8, patch_size=2, in_chans=1, embed_dim=32, heads=2, depth=2, num_classes=10
    )
    model.init_weights()
    found = list(theorem_gap.heads_of(model.eval(), torch.randn(3, 1, 8, 8)))
    assert [(heads.shape[0], heads.shape[2], count) for heads, count in found] == [(3, 128, 2)] * 2
    assert all(heads.isfinite().all() for heads, _ in found)
    assert not any(m.capture_samples for m in model.attention_modules().values())


def test_claims_are_those_of_made_up_steps() -> None:
    runs = [
        {
            "arm": "a",
            "seed": seed,
            "theorem": 0.3 + 0.01 * seed,
            "covariance": 1.0,
            "centred": 1.2,
            "real": 2.5,
        }
        for seed in range(5)
    ]
    claims = theorem_gap.decide(runs, ["a"])
    # The gap is 2.18, of which the mean over tokens is 1.3, and the covariance 0.68 of 0.88.
    assert [claim.effect for claim in claims] == pytest.approx([1.18, 0.21, 0.24])
    assert all(claim.p < 1e-3 for claim in claims)


def test_without_runs_it_says_which_study_makes_them(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        theorem_gap.main(["--runs", str(tmp_path)])
    assert "run python -m studies.kappa_against_heads first" in capsys.readouterr().err


RECORDED = runner.RESULTS / f"{theorem_gap.NAME}.json"


@pytest.mark.skipif(not RECORDED.exists(), reason="nothing is recorded")
def test_recorded_claims_follow_from_the_recorded_steps() -> None:
    found = json.loads(RECORDED.read_text())
    arms = list(dict.fromkeys(run["arm"] for run in found["runs"]))
    again = theorem_gap.decide(found["runs"], arms)
    for one, other in zip(again, (Claim(**claim) for claim in found["claims"]), strict=True):
        assert (one.claim, one.verdict(one.p)) == (other.claim, other.verdict(other.p))
        assert math.isclose(one.effect, other.effect, rel_tol=1e-6)
