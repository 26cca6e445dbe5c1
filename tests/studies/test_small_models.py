"""Studies of small models: sizes of their arms, runs, and verdicts on results that are made up."""

import itertools
import json

import numpy as np
import pytest
import torch

from leaner_kernels.nn import ManyHeadAttention
from studies import allocation, depth_for_heads, figures, ideal_observer, planner, train_small
from studies.study import Arm, judged
from train.data import listops


def built(task: str, arm: Arm):
    """Return an arm's model on meta, and the FLOPs of its forwards over all steps."""
    given = train_small.arguments(["--task", task, *arm.flags, "--out", "-"])
    with torch.device("meta"):
        model = train_small.build(given)
    return model, model.flops_per_sequence() * given.steps


@pytest.mark.parametrize("task", depth_for_heads.SETTINGS)
def test_arms_of_equal_parameters_and_of_equal_flops_are(task: str) -> None:
    setting = depth_for_heads.SETTINGS[task]
    made = {
        arm.name: built(setting.task, Arm(arm.name, "", 0, (*setting.common_flags[2:], *arm.flags)))
        for arm in depth_for_heads.arms(task)
    }
    if setting.arm_names is not None:
        assert set(made) == {"original", "lean"}
        assert made["lean"][0].num_params() < 0.55 * made["original"][0].num_params()
        return
    lean, narrow = (made[name][0].num_params() for name in ("lean", "deep-and-narrow"))
    assert narrow == pytest.approx(lean, rel=0.01)
    assert made["lean-at-equal-flops"][1] == pytest.approx(made["original"][1], rel=0.01)
    assert lean < 0.55 * made["original"][0].num_params()


@pytest.mark.parametrize("part", ["spread", "cuts"])
def test_arms_that_are_compared_have_as_wide_attention(part: str) -> None:
    width = {}
    for arm in allocation.STUDIES[part].scales["cpu"].arms:
        layers = [m for m in built("python", arm)[0].modules() if isinstance(m, ManyHeadAttention)]
        width[arm.name] = sum(layer.num_heads * layer.head_dim for layer in layers)
    if part == "spread":
        assert set(width.values()) == {768}
    else:
        for share in allocation.CUTS:
            assert width[f"late-{share}"] == width[f"uniform-{share}"]
            assert width[f"late-{share}"] / width["whole"] == pytest.approx(
                1 - share / 100, abs=5e-3
            )


@pytest.mark.parametrize(("figure", "points"), [("3", 17), ("4", 15), ("5", 6), ("8", 7), ("9", 7)])
def test_a_figure_compares_its_points_with_the_original(figure: str, points: int) -> None:
    scale = figures.STUDIES[figure].scales["paper"]
    original, *others, again = scale.arms
    assert len(others) == points
    assert again.flags == original.flags
    assert all(arm.flags == ("--model", arm.name) for arm in others)
    accuracy = {arm.name: 0.5 for arm in scale.arms} | {others[0].name: 0.48}
    runs = [
        {"arm": name, "seed": seed, "held_out_accuracy": share + seed * place * 1e-5}
        for place, (name, share) in enumerate(accuracy.items())
        for seed in range(3)
    ]
    claims = judged(figures.STUDIES[figure].decide(runs, scale))
    assert [verdict for *_, verdict in claims[:-1]] == ["fails", *["holds"] * (points - 1)]


def test_a_run_is_of_its_seed_and_learns(tmp_path) -> None:
    flags = ("--depth", "1", "--heads", "2", "--head-dim", "8", "--width", "32", "--context", "16")
    losses = []
    for number, (seed, steps) in enumerate([(3, 40), (3, 40), (4, 40), (3, 2)]):
        out = tmp_path / str(number)
        more = ("--seed", str(seed), "--steps", str(steps), "--out", str(out))
        train_small.main(["--task", "python", *flags, *more])
        summary = json.loads((out / "summary.json").read_text())
        losses.append(summary["held_out_loss"])
        rows = [json.loads(line) for line in (out / "kappa_probe.jsonl").read_text().splitlines()]
        at = [row["step"] for row in rows]
        assert at == ([*range(0, 41, 2)] if steps == 40 else [0, 1, 2])
        assert len(summary["losses"]) == len(summary["accuracies"]) == len(at)
    assert losses[0] == losses[1] != losses[2]
    assert max(losses[:3]) < losses[3] - 0.5


def test_lists_are_items_that_their_model_takes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train_small, "SIZES", {"train": 40, "dev": 2, "test": 4})
    monkeypatch.setattr(train_small, "CACHE", tmp_path)
    task = train_small.lists()
    model = train_small.build(train_small.arguments(["--task", "listops", "--out", "-"]))
    tokens, values = task.pick(np.arange(36, 41))  # past the last list: the last five
    logits, targets = task.scores(model, (tokens, values))
    assert logits.shape == (len(targets), 1 + len(listops.SYMBOLS))
    assert len(tokens) == 5 < len(targets)
    assert set(targets.tolist()) <= set(range(1, 11))  # the ids of digits
    assert (tokens == listops.IDS["]"]).equal(values > 0)
    assert not (tokens == listops.IDS["[SM"]).any()
    lengths = (tokens > 0).sum(1).tolist()
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == tokens.shape[1]
    held_out, whole = task.held_out
    assert (whole > 0).sum(1).tolist() == [1] * 4
    assert whole.argmax(1).equal((held_out > 0).sum(1) - 1)


def test_each_list_in_a_list_has_its_value_at_its_bracket() -> None:
    example = [listops.IDS[symbol] for symbol in ["[MAX", "2", "9", "[MIN", "4", "7", "]", "]"]]
    assert train_small.inner_values(np.array(example)).tolist() == [0] * 6 + [5, 10]
    lists = listops.generate(3, {"train": 200, "dev": 0, "test": 0}, train_small.LISTS)["train"]
    whole = [train_small.inner_values(lists[i])[-1] for i in range(200)]
    assert whole == [1 + label for label in lists.labels.tolist()]


def reached_by_steps(maze: np.ndarray, start: tuple[int, int]) -> set[tuple[int, int]]:
    """Return the cells that a walker reaches who steps to open cells only."""
    found, left = {start}, [start]
    while left:
        row, column = left.pop()
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = min(cell) >= 0 and max(cell) < len(maze)
            if inside and maze[cell] < 0.5 and cell not in found:
                found.add(cell)
                left.append(cell)
    return found


def test_targets_of_a_maze_are_the_cells_that_its_start_reaches() -> None:
    images, targets = train_small.mazes(np.random.default_rng(3), 200)
    assert images.shape == (200, 1, 20, 20)
    assert images.dtype == torch.float32
    side = train_small.CELLS
    cells = images.reshape(200, side, train_small.PIXELS, side, train_small.PIXELS)
    assert (cells == cells[:, :, :1, :, :1]).all()
    outcomes = set()
    for maze, target in zip(cells[:, :, 0, :, 0].numpy(), targets.reshape(-1, side, side).numpy()):
        (start,) = zip(*np.nonzero(maze == -2))
        reached = reached_by_steps(maze, start)
        for cell in np.ndindex(side, side):
            wanted = -100 if maze[cell] == 1 else int(cell in reached)
            assert target[cell] == wanted
            outcomes.add(wanted)
    assert outcomes == {-100, 0, 1}


def noisy_mazes(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    images, targets = train_small.mazes(generator, count)
    return train_small.add_noise(generator, images)[:, 0].double().numpy(), targets.numpy()


def test_the_ideal_observer_knows_what_a_target_is(monkeypatch) -> None:
    monkeypatch.setattr(train_small, "NOISE", 0.1)
    images, targets = noisy_mazes(1, 40)
    sure = ideal_observer.probabilities(images, np.random.default_rng(0))
    assert sure[targets >= 0] == pytest.approx(targets[targets >= 0], abs=1e-3)
    # Without pixels, a neighbour of the start is reached whenever it is open.
    monkeypatch.setattr(train_small, "NOISE", 1e6)
    blank = np.zeros((1, 20, 20))
    blank[0, 4:8, 4:8] = -2
    (share,) = ideal_observer.probabilities(blank, np.random.default_rng(0))
    share = share.reshape(5, 5)
    assert share[[0, 1, 1, 1, 2], [1, 0, 1, 2, 1]] == pytest.approx(1, abs=1e-3)
    free = 1 - train_small.WALLS
    assert 1 - (1 - free) ** 2 < share[0, 0] < 1 - (1 - free) ** 2 + 0.05
    assert share[4, 4] < share[0, 0]


def test_the_ideal_observer_agrees_with_a_sum_over_all_walls(monkeypatch) -> None:
    for module in (train_small, ideal_observer):
        monkeypatch.setattr(module, "CELLS", 3)
    image, _ = noisy_mazes(11, 1)
    (share,) = ideal_observer.probabilities(image, np.random.default_rng(0))
    means = image.reshape(3, 4, 3, 4).mean(axis=(1, 3))
    start = divmod(int(means.argmin()), 3)
    spread, odds = train_small.NOISE / 4, train_small.WALLS / (1 - train_small.WALLS)
    total, both = np.zeros((3, 3)), np.zeros((3, 3))
    for bits in itertools.product((0, 1), repeat=9):
        walls = np.array(bits).reshape(3, 3)
        if walls[start]:
            continue
        weight = np.exp(-((means - walls) ** 2) / (2 * spread**2)) * odds**walls
        weight[start] = 1
        own = weight.prod()
        total += own * (walls == 0)
        for cell in reached_by_steps(walls, start):
            both[cell] += own
    assert share.reshape(3, 3) == pytest.approx(both / total, abs=0.02)
    assert ((share > 0.05) & (share < 0.95)).sum() > 3  # so that the agreement says something


def test_the_ideal_observer_is_calibrated() -> None:
    images, targets = noisy_mazes(2, 300)
    share = ideal_observer.probabilities(images, np.random.default_rng(0))[targets >= 0]
    reached = targets[targets >= 0] == 1
    assert share.mean() == pytest.approx(reached.mean(), abs=0.015)
    expected = np.maximum(share, 1 - share).mean()
    assert ((share > 0.5) == reached).mean() == pytest.approx(expected, abs=0.01)


@pytest.fixture
def few_mazes(monkeypatch) -> None:
    monkeypatch.setattr(train_small, "TRAINING_MAZES", 60)
    monkeypatch.setattr(train_small, "VALIDATION_MAZES", 50)
    monkeypatch.setattr(train_small, "HELD_OUT_MAZES", 70)


@pytest.mark.usefixtures("few_mazes")
def test_a_maze_returns_with_other_noise_and_its_model_takes_it() -> None:
    task = train_small.pictures(seed=3)
    chosen = np.array([5, 7, 60 * (1 << 28) + 5])
    images, targets = task.pick(chosen)
    assert images.equal(task.pick(chosen)[0])
    assert targets[0].equal(targets[2])
    assert not targets[0].equal(targets[1])
    for other in (images[2], task.pick(chosen + 60)[0][0]):
        apart = images[0] - other
        assert apart.std() == pytest.approx(2**0.5 * train_small.NOISE, rel=0.1)
        assert abs(apart.mean()) < 0.4
    assert chosen.max() < task.items
    flags = ["--task", "pictures", "--width", "30", "--depth", "1", "--out", "-"]
    model = train_small.build(train_small.arguments(flags))
    logits, open_cells = task.scores(model, (images, targets))
    assert logits.shape == (len(open_cells), 2)
    assert len(open_cells) == (targets >= 0).sum() < targets.numel()
    positions = model.pos_embed[0, :, :28].reshape(5, 5, 28)
    assert positions[2, 0, :14].equal(positions[2, 3, :14])  # of a row
    assert positions[0, 3, 14:].equal(positions[2, 3, 14:])  # and of a column
    assert len(model.pos_embed[0].unique(dim=0)) == 25


@pytest.mark.usefixtures("few_mazes")
def test_every_maze_has_its_own_targets(monkeypatch) -> None:
    monkeypatch.setattr(train_small, "NOISE", 0.1)
    task = train_small.pictures(seed=4)
    assert task.validation is not None
    parts = task.pick(np.arange(60)), task.validation, task.held_out
    assert [len(images) for images, _ in parts] == [60, 50, 70]
    for images, targets in parts:
        pixels, wanted = images[:, 0].double().numpy(), targets.numpy()
        share = ideal_observer.probabilities(pixels, np.random.default_rng(0))
        assert share[wanted >= 0] == pytest.approx(wanted[wanted >= 0], abs=1e-3)


def test_no_maze_that_is_measured_is_learned(monkeypatch) -> None:
    monkeypatch.setattr(train_small, "NOISE", 0.0)
    one, other = (train_small.pictures(seed) for seed in (0, 1))

    def walls(images: torch.Tensor) -> set[bytes]:
        return {maze.tobytes() for maze in (images[:, 0, ::4, ::4] == 1).numpy()}

    assert one.validation is not None
    measured = [walls(one.held_out[0]), walls(one.validation[0])]
    learned = [walls(task.pick(np.arange(1250))[0]) for task in (one, other)]
    assert min(map(len, learned)) > 1240
    for own in learned:
        assert all(len(own & others) < 5 for others in measured)  # by chance, with another start
    assert len(learned[0] & learned[1]) < 5
    assert len(measured[0] & measured[1]) < 5
    assert one.held_out[0].equal(other.held_out[0])


def test_logits_of_a_patch_are_of_its_pixels() -> None:
    torch.manual_seed(0)
    flags = ["--task", "pictures", "--width", "16", "--depth", "1", "--out", "-"]
    model = train_small.build(train_small.arguments(flags))
    for block in model.blocks:  # so that no token reads another
        block.attn.proj.weight.data.zero_()
    images = torch.randn(1, 1, 20, 20)
    before = model(images)[0]
    images[0, 0, 8:12, 4:8] += 1
    differ = (model(images)[0] != before).any(dim=1)
    assert differ.nonzero().flatten().tolist() == [2 * 5 + 1]


def test_a_part_of_the_text_is_of_the_same_held_out_items() -> None:
    whole, part = train_small.python_bytes(), train_small.python_bytes(every=12)
    assert part.items < whole.items / 10
    assert part.held_out[0].equal(whole.held_out[0])
    with pytest.raises(SystemExit):
        train_small.arguments(["--task", "python", "--every-file", "0", "--out", "-"])


def test_an_arm_is_flat_if_its_last_fifth_hardly_changes_the_loss_on_average() -> None:
    def run(end: float) -> dict[str, list[float]]:
        return {"losses": [5.0, *[2.0] * 15, 1.0, 0.9, 0.9, 1.2, end]}

    assert depth_for_heads.fall_at_end(run(0.975)) == pytest.approx(2.5)
    assert depth_for_heads.is_flat("pictures", [run(0.975)])
    assert not depth_for_heads.is_flat("python-to-the-end", [run(0.975)])
    with pytest.raises(ValueError, match="python is not trained to the end"):
        depth_for_heads.is_flat("python", [run(1)])
    assert not depth_for_heads.is_flat("pictures", [run(0.945)])
    assert not depth_for_heads.is_flat("pictures", [run(1.055)])
    assert depth_for_heads.is_flat("pictures", [run(0.945), run(1.055)])
    assert not depth_for_heads.is_flat("pictures", [run(0.92), run(0.975)])


def test_leads_are_of_the_same_seed_and_time() -> None:
    def run(arm: str, seed: int, losses: list[float]) -> dict:
        accuracies = [1 - loss for loss in losses]
        return {"arm": arm, "seed": seed, "losses": losses, "accuracies": accuracies}

    flat, early = [0.9] * 16 + [0.5] * 5, [0.9, 0.2] + [0.6] * 14 + [0.5, 0.5, 0.5, 0.5, 0.4]
    runs = [run("lean", 1, early), run("original", 0, flat), run("lean", 0, flat)]
    runs += [run("original", 1, [0.3] * 21)]
    leads = depth_for_heads.lead_during("pictures", runs).values()
    for lead, expected in zip(leads, ([0, -20], [0, -10], [0, 10]), strict=True):
        assert lead == pytest.approx(expected)
    (_, last, _) = depth_for_heads.lead_during("python-to-the-end", runs).values()
    assert last == pytest.approx([0, -100 * np.log(0.4 / 0.3)])
    with pytest.raises(ValueError, match=r"have the seeds \[0, 1\] and \[0\]"):
        depth_for_heads.lead_during("pictures", runs[1:])


def test_an_arm_takes_the_rate_of_its_lowest_loss(tmp_path, monkeypatch) -> None:
    task = "python-to-the-end"
    low, middle, high = depth_for_heads.SETTINGS[task].rates
    loss = {"original": (1.3, 1.2, 1.25), "lean": (1.5, 1.4, 1.3)}
    flat = [1.0] * 21
    runs = [
        {"arm": f"{arm}-lr-{rate}", "held_out_loss": value, "losses": flat}
        for arm, values in loss.items()
        for rate, value in zip((low, middle, high), values)
    ]
    path = tmp_path / "depth_for_heads_python-to-the-end-rates.json"
    monkeypatch.setattr(depth_for_heads, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=f"--task {task} --scale rates --record first"):
        depth_for_heads.best_rates(task)
    path.write_text(json.dumps({"runs": runs}))
    rates = depth_for_heads.best_rates(task)
    assert (rates["original"], rates["lean"]) == (middle, high)
    arms = {arm.name: arm for arm in depth_for_heads.tried(task)}
    assert arms[f"lean-lr-{high}"].flags[-2:] == ("--lr", high)
    assert len(arms) == 6
    # Validation counts before held-out items, and a run that is not flat only after all that are.
    runs[0] |= {"validation_loss": 1.1}
    runs[-1] |= {"losses": [1.0] * 20 + [0.9]}
    path.write_text(json.dumps({"runs": runs}))
    rates = depth_for_heads.best_rates(task)
    assert (rates["original"], rates["lean"]) == (low, middle)


def test_without_its_rates_a_task_offers_only_to_try_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(depth_for_heads, "RESULTS", tmp_path)
    assert [*depth_for_heads.scales("pictures")] == ["rates"]
    assert [*depth_for_heads.scales("python")] == ["cpu", "gpu15"]


def runs_of(losses: dict[str, float], **others: float) -> list[dict]:
    """Return three runs of each arm, whose losses differ a little between seeds."""
    return [
        {
            "arm": arm,
            "seed": seed,
            "held_out_loss": loss * (1 + 1e-3 * seed),
            "held_out_accuracy": 1 - loss * (1 + 1e-3 * seed * (1 + number % 3)),
            **others,
        }
        for number, (arm, loss) in enumerate(losses.items())
        for seed in range(3)
    ]


@pytest.mark.parametrize("task", depth_for_heads.SETTINGS)
def test_verdicts_on_depth_follow_the_losses(task: str) -> None:
    loss = dict.fromkeys(("original", "original-again", "heads-only", "lean"), 0.5)
    loss |= {"shallow-only": 0.6, "lean-without-mlp-change": 0.55, "deep-and-narrow": 0.6}
    loss |= {"lean-at-equal-flops": 0.4}
    setting = depth_for_heads.SETTINGS[task]
    runs = runs_of({name: loss[name] for name in setting.arm_names or loss})
    verdicts = [verdict for *_, verdict in judged(depth_for_heads.decide(task, runs))]
    if setting.arm_names is not None:
        assert verdicts == ["holds", "undecided"]
        return
    assert verdicts[:3] == ["holds", "holds", "fails"]
    at_the_end = ["fails", "holds", "fails"] if setting.to_the_end else []
    assert verdicts[4:] == ["holds", "holds", *at_the_end, "holds"]


def test_the_central_claim_is_repeated_with_its_two_arms(tmp_path, monkeypatch) -> None:
    runs = [
        {"arm": arm.name, "held_out_loss": arm.x, "losses": [1.0] * 21}
        for arm in depth_for_heads.tried("pictures")
    ]
    path = tmp_path / "depth_for_heads_pictures-rates.json"
    path.write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(depth_for_heads, "RESULTS", tmp_path)
    scales = depth_for_heads.scales("pictures")
    assert [arm.name for arm in scales["central"].arms] == ["original", "lean"]
    assert set(scales["central"].arms) < set(scales["cpu"].arms)
    claims = depth_for_heads.decide("pictures", runs_of({"original": 0.5, "lean": 0.51}))
    assert [claim.claim for claim in claims] == [
        "lean is no worse than the original (within 0.5 point)"
    ]


def test_the_planner_is_compared_with_what_was_measured(tmp_path, monkeypatch) -> None:
    losses = {"a": 0.5, "b": 0.6, "c": 0.7, "d-again": 0.1}
    runs = runs_of(losses, kappa=1.0)
    order = {"a": 3, "b": 2, "c": 1, "d-again": 0}
    for run in runs:
        run |= {"kappa_at_first": run["held_out_loss"] ** 2, "params": 10 * order[run["arm"]]}
        run["kappa"] = order[run["arm"]] + 1
    (tmp_path / "allocation_x.json").write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(planner, "RESULTS", tmp_path)
    (found,) = planner.correlations()
    assert found["arms"] == 3
    assert found["κ before training"] == pytest.approx((1, 1, 1))
    assert found["κ after training"] == pytest.approx((-1, -1, -1))
    assert found["parameters"] == pytest.approx((1, 1, 1))
    said = planner.section()
    assert "1.00 [1.00, 1.00]" in said
    assert "The interval of κ before training and parameters is above 0 in all of them." in said
    losses |= {"a": 0.9}
    (tmp_path / "allocation_y.json").write_text(
        json.dumps(
            {
                "runs": [
                    run | {"held_out_loss": losses[run["arm"]] * (1 + 1e-3 * run["seed"])}
                    for run in runs
                ]
            }
        )
    )
    assert "No ranking is above 0 in all of them" in planner.section()
