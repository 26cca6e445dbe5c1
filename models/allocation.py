"""Distribute heads, or their width, over the layers of a model.

"Allocation of Parameters in Transformers" (arXiv:2510.03784) argues that early layers need more
heads and later ones fewer. It prints no schedule; the ones here are our own design.
"""

from typing import Literal, get_args

Strategy = Literal["uniform", "early", "late", "saturated"]
STRATEGIES = get_args(Strategy)
# Heads of the first and the last layer under "early", relative to the uniform number.
_MOST, _LEAST = 1.7, 0.3


def allocate(
    strategy: Strategy, heads: int, head_dim: int, depth: int
) -> tuple[list[int], list[int]]:
    """Return the number of heads of each layer, and their width.

    - ``"uniform"``: as given.
    - ``"early"``: falls linearly from 1.7 times the average in the first layer to 0.3 times in the
      last, rounded to whole heads. The total number of heads, parameters and FLOPs do not change.
    - ``"late"``: the reverse.
    - ``"saturated"``: heads are half as wide, rounded up, in the later half of the layers. This
      reduces the attention width by a quarter.

    Args:
        strategy: one of ``STRATEGIES``.
        heads: number of heads of a layer, on average.
        head_dim: width of a head.
        depth: number of layers.

    Raises:
        ValueError: another strategy, or a number below 1.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    for name, number in (("heads", heads), ("head_dim", head_dim), ("depth", depth)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    counts, widths = [heads] * depth, [head_dim] * depth
    if strategy in ("early", "late") and depth > 1:
        fall = (_MOST - _LEAST) / (depth - 1)
        wanted = [heads * (_MOST - fall * layer) for layer in range(depth)]
        # Every layer has a head; heads left by rounding down go to the largest remainders.
        counts = [max(1, int(number)) for number in wanted]
        order = sorted(range(depth), key=lambda layer: counts[layer] - wanted[layer])
        missing = heads * depth - sum(counts)
        for layer in order[: max(0, missing)]:
            counts[layer] += 1
        for _ in range(-missing):
            counts[counts.index(max(counts))] -= 1
        if strategy == "late":
            counts.reverse()
    if strategy == "saturated":
        whole = -(-depth // 2)
        widths[whole:] = [-(-head_dim // 2)] * (depth - whole)
    return counts, widths
