"""Our attention in a model of transformers: one line, the same logits, and kappa of every layer.

    python examples/transformers_drop_in.py
    python examples/transformers_drop_in.py gpt2

Without the name of a checkpoint the model is a small Llama of random weights.
"""

import argparse
import time

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from leaner_kernels import KappaMonitor
from leaner_kernels.adapters import transformers as leaner

TOKENS, BATCH = 128, 4
SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    intermediate_size=512,
)


def logits_and_time(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """Return the logits of the tokens that are not padding, and the milliseconds of a forward."""
    best = float("inf")
    with torch.no_grad():
        for _ in range(4):
            start = time.perf_counter()
            logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
            if logits.is_cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
    return logits, 1e3 * best


def main() -> None:
    """Compare, then train one step."""
    parser = argparse.ArgumentParser(description="Our attention in a model of transformers.")
    parser.add_argument("checkpoint", nargs="?", help="of a model that continues texts")
    args = parser.parse_args()
    leaner.register()
    torch.manual_seed(0)
    if args.checkpoint is None:
        model = AutoModelForCausalLM.from_config(SMALL)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint, trust_remote_code=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.eval().to(device)
    ids = torch.randint(model.config.vocab_size, (BATCH, TOKENS), device=device)
    lengths = torch.tensor([TOKENS, TOKENS // 2, TOKENS, TOKENS // 3], device=device)
    mask = (torch.arange(TOKENS, device=device) < lengths[:, None]).long()

    theirs, their_time = logits_and_time(model, ids, mask)
    model.set_attn_implementation("leaner")  # the one line
    ours, our_time = logits_and_time(model, ids, mask)
    apart = (ours - theirs).abs().max() / theirs.abs().max()
    print(f"{type(model).__name__} on {device}, {BATCH} texts of up to {TOKENS} tokens")
    print(f"sdpa {their_time:.1f} ms, leaner {our_time:.1f} ms a forward")
    print(f"logits differ by {apart:.1e} of the largest")

    optimizer = torch.optim.AdamW(model.parameters())
    monitor = KappaMonitor(model, every=1, samples=2)
    monitor.begin(0)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    print(f"a training step, loss {loss.item():.3f}, and what its attention was like:")
    for row in [*monitor.end(), *monitor.flush()]:
        kappa = "unresolved" if row["kappa"] is None else f"{row['kappa']:.1f}"
        print(
            f"  {row['layer']}: {row['heads']} heads of {row['head_dim']}, kappa {kappa}, "
            f"entropy {row['entropy']:.2f} nats, largest logit {row['max_logit']:.2f} "
            f"({row['source']})"
        )


if __name__ == "__main__":
    main()
